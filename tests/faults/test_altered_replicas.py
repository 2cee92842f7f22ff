"""A replica that another writer altered is set aside if changes no longer fit, and the command in the message repairs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.fs import DeltaStorageHandler

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import FOUND, output_of, settle, site
from tests.fixtures.s3_server import S3Server

pytestmark = pytest.mark.slow

Act = Callable[[DeltaTable], object]


def _append_only(table: DeltaTable) -> None:
    table.alter.set_table_properties({"delta.appendOnly": "true"})


def _constraint(table: DeltaTable) -> None:
    table.alter.add_constraint({"none_yet": "amount = 0"})


def _taken_key(table: DeltaTable) -> None:
    write_deltalake(table, pa.table({"amount": [1, 2]}), mode="overwrite", schema_mode="overwrite")


def _other_types(table: DeltaTable) -> None:
    _replaced(table, pa.schema({"id": pa.int32(), "region": pa.int32(), "note": pa.int32()}))


def _partitioned(table: DeltaTable) -> None:
    own = [("id", pa.int32()), ("amount", pa.int32())]
    _replaced(table, pa.schema([*own, pa.field("part", pa.int32(), nullable=False)]), partition_by=["part"])


def _replaced(table: DeltaTable, schema: pa.Schema, **kinds: Any) -> None:
    DeltaTable.create(
        table.table_uri, schema, mode="overwrite", storage_options=table._storage_options, **kinds
    )


def _lost_checkpoint(table: DeltaTable) -> None:
    table.create_checkpoint()
    log = pafs.PyFileSystem(DeltaStorageHandler.from_table(table._table))
    log.delete_file(f"_delta_log/{table.version():020d}.checkpoint.parquet")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("table", "alter", "message"),
    [
        pytest.param("orders", _other_types, "Cast error", marks=pytest.mark.long),
        ("checking", _partitioned, "validation check"),
        ("checking", _lost_checkpoint, "its log lacks an entry or a checkpoint"),
        pytest.param("checking", _append_only, "append-only", marks=pytest.mark.long),
        pytest.param("journal", _constraint, "validation check", marks=pytest.mark.long),
        pytest.param(
            "checking",
            _taken_key,
            'no longer has the column "id"',
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("place", [pytest.param("folder", marks=pytest.mark.long), "s3"])
def test_a_replica_that_others_altered_is_set_aside_and_the_named_command_copies_it(
    publisher_server: EmbeddedServer,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    place: str,
    table: str,
    alter: Act,
    message: str,
) -> None:
    """It takes long: many commands, each a process, and an S3 server."""
    store: S3Server | None = request.getfixturevalue("s3_server") if place == "s3" else None
    with site("altered", publisher_server, tmp_path, "threads[2]", store=store) as (pgsieve, database):
        settle(pgsieve, database)
        subscription = "filtered" if table == "orders" else "accounts"
        replica = pgsieve.replica(subscription, table)
        alter(
            DeltaTable(f"s3://{replica}", storage_options=store.delta_rs)
            if store
            else DeltaTable(str(replica))
        )
        pgsieve.write(database)
        database.execute("INSERT INTO checking VALUES (1000, 0)")
        for command in ("run", "status"):
            output = output_of(pgsieve, command, ends=FOUND if command == "run" else 0)
            assert message in output
            assert f"`pgsieve resync {subscription} public.{table}` copies the table again" in output
            assert "Traceback" not in output
            assert "Cannot cast" not in output, "the rest of this message contains a value"
        assert "public.savings is set aside" not in output
        output_of(pgsieve, "resync", subscription, ends=0)
        pgsieve.write(database)
        settle(pgsieve, database)
        output_of(pgsieve, "check", ends=0)

"""A standby as the source (PostgreSQL 16 and later): slot, copy and changes use the standby, and the primary is untouched.

Section 49.2.3, Logical decoding on standby. The replica's rows are compared with the primary's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import yaml
from deltalake import DeltaTable
from typer.testing import CliRunner

from pgsieve.pipelines.command_line import cli
from tests.fixtures.standby import StandbyPair

Pgsieve = Callable[..., tuple[int, str]]


pytestmark = [pytest.mark.slow, pytest.mark.drawn]


@pytest.fixture
def pgsieve(standby_pair: StandbyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pgsieve:
    """Runs commands with a configuration that names the standby."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    file = tmp_path / "pgsieve.yaml"
    written = {
        "lake": "./lake",
        "sources": {"shop": {"conninfo": standby_pair.standby.conninfo(), "standby": "true"}},
        "subscriptions": {
            "ours": {"source": "shop", "publications": ["p"]},
            "theirs": {"source": "shop", "publications": ["p"], "row_filter": "publisher"},
        },
    }
    file.write_text(yaml.safe_dump(written))

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, ["-c", str(file), *arguments], prog_name="pgsieve")
        return result.exit_code, result.stdout + result.stderr

    return run


def rows(tmp_path: Path, subscription: str) -> list[tuple[int, str]]:
    table = DeltaTable(str(tmp_path / "lake" / subscription / "public" / "orders")).to_pyarrow_table()
    return sorted((row["id"], row["region"]) for row in table.to_pylist())


def setting_up(pair: StandbyPair, pgsieve: Pgsieve) -> None:
    pair.on_primary(
        "create table orders (id int primary key, region text not null); alter table orders replica identity full;"
        "insert into orders select i, (array['EMEA', 'APAC'])[1 + i %% 2] from generate_series(1, 6) i;"
        "create publication p for table orders where (region = 'EMEA')".replace("%%", "%")
    )
    with pair.logging_snapshots():
        code, text = pgsieve("run")
    assert code == 2
    assert "run what `pgsieve validate` prints on its primary" in text
    statements = json.loads(pgsieve("validate", "--json")[1])["statements"]
    pair.on_primary("".join(statements))


def test_copies_come_from_a_standby_and_nothing_is_created_on_the_primary(
    standby_pair: StandbyPair, pgsieve: Pgsieve, tmp_path: Path
) -> None:
    """It takes long: a primary and a standby start, and several commands run."""
    setting_up(standby_pair, pgsieve)
    with standby_pair.logging_snapshots():
        code, text = pgsieve("run")
    assert code == 0, text
    assert rows(tmp_path, "ours") == rows(tmp_path, "theirs") == [(2, "EMEA"), (4, "EMEA"), (6, "EMEA")]
    slots = "select slot_name from pg_replication_slots where slot_type = 'logical' order by 1"
    with psycopg.connect(standby_pair.primary.conninfo()) as primary:
        assert primary.execute(slots).fetchall() == []
    with psycopg.connect(standby_pair.standby.conninfo()) as standby:
        assert standby.execute(slots).fetchall() == [("pgsieve_shop",), ("pgsieve_shop_theirs",)]
    report = json.loads(pgsieve("status", "--json")[1])
    assert all(slot["lag_bytes"] is not None and slot["problem"] is None for slot in report["slots"])


@pytest.mark.long
@pytest.mark.spark
def test_changes_come_from_a_standby_until_it_is_promoted_and_after(
    standby_pair: StandbyPair, pgsieve: Pgsieve, tmp_path: Path
) -> None:
    """It takes long: a primary and a standby start, and several commands run."""
    setting_up(standby_pair, pgsieve)
    with standby_pair.logging_snapshots():
        assert pgsieve("run")[0] == 0
    standby_pair.on_primary(
        "insert into orders values (7, 'EMEA'), (9, 'APAC'); update orders set region = 'EMEA' where id = 1;"
        "update orders set region = 'APAC' where id = 2; delete from orders where id = 4"
    )
    code, text = pgsieve("run")
    assert code == 0, text
    expected = [(1, "EMEA"), (6, "EMEA"), (7, "EMEA")]
    assert rows(tmp_path, "ours") == rows(tmp_path, "theirs") == expected
    # After an alteration the slice is decoded once more, on the standby.
    standby_pair.on_primary("alter publication p set table orders where (region = 'APAC')")
    standby_pair.on_primary("insert into orders values (11, 'APAC'), (13, 'EMEA')")
    assert pgsieve("run")[0] == 0
    expected += [(11, "APAC")]
    assert rows(tmp_path, "ours") == rows(tmp_path, "theirs") == expected
    standby_pair.primary.stop(immediate=True)
    with psycopg.connect(standby_pair.standby.conninfo(), autocommit=True) as promoted:
        promoted.execute("select pg_promote()")
        promoted.execute("insert into orders values (15, 'APAC')")
    code, text = pgsieve("run")
    assert code == 0, text
    assert rows(tmp_path, "ours") == rows(tmp_path, "theirs") == [*expected, (15, "APAC")]


def test_an_unexpected_standby_is_refused(
    standby_pair: StandbyPair, pgsieve: Pgsieve, tmp_path: Path
) -> None:
    standby_pair.on_primary("create table orders (id int primary key); create publication p for table orders")
    file = tmp_path / "pgsieve.yaml"
    file.write_text(file.read_text().replace("standby: 'true'", "standby: 'false'"))
    code, text = pgsieve("run")
    assert code == 2
    assert "the server is a standby" in text
    assert "`standby: true`" in text

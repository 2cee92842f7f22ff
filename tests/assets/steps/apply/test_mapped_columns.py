"""Changes of a replica with column mapping, applied by files: the rows are right, and columns keep their names and numbers in the files. No JVM."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pgsieve.resources.lake.delta.key_lookup import Flag
from pgsieve.resources.lake.delta.records import APPLICATION_ID
from pgsieve.resources.lake.delta.row_removal import enable_marking
from tests.fixtures.replica_changes import (
    Change,
    Changes,
    Columns,
    Row,
    count_rows,
    definition,
    delete,
    draw_changes,
    followed,
    insert,
    row,
    update,
)

#: The protocols of tables with column mapping: with lists of features, and without.
_MAPPING_PROTOCOLS = {
    "features": {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["columnMapping"],
        "writerFeatures": ["appendOnly", "columnMapping", "invariants"],
    },
    "features of writers": {
        "minReaderVersion": 2,
        "minWriterVersion": 7,
        "writerFeatures": ["appendOnly", "columnMapping", "invariants"],
    },
    "versions": {"minReaderVersion": 2, "minWriterVersion": 5},
}


def _maps_names(changes: Changes, protocol: str) -> None:
    """Make the replica anew with column mapping: each column has the name of another one in the files."""
    local, names = changes.lake.delta_rs, changes.schema.names
    assert local is not None
    rows = [local.read_all_rows(changes.path).slice(begin, 10) for begin in range(0, 40, 10)]
    local.remove(changes.path)
    fields = [
        {
            "name": name,
            "type": {"string": "string", "int64": "long", "bool": "boolean"}[
                str(changes.schema.field(name).type)
            ],
            "nullable": True,
            "metadata": {"delta.columnMapping.id": 7 - number, "delta.columnMapping.physicalName": stored},
        }
        for number, (name, stored) in enumerate(zip(names, [*names[1:], names[0]], strict=True))
    ]
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": [],
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "7"},
        "createdTime": 1,
    }
    (entries := Path(changes.path, "_delta_log")).mkdir(parents=True)
    actions = [{"protocol": _MAPPING_PROTOCOLS[protocol]}, {"metaData": metadata}]
    (entries / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
    position = CommitProperties(app_transactions=[Transaction(APPLICATION_ID, 100)])
    for part in rows:
        write_deltalake(changes.path, part, mode="append", commit_properties=position)


def _logged_schema(changes: Changes) -> object:
    """The schema of the replica as its log has it, with the names and numbers of columns in files."""
    return json.loads(DeltaTable(changes.path).schema().to_json())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by_files", "by_key_parts"])
@pytest.mark.parametrize("protocol", _MAPPING_PROTOCOLS)
@pytest.mark.parametrize("marking", [False, True])
def test_random_changes_of_mapped_columns_leave_the_same_rows(
    tmp_path: Path, way: str, protocol: str, *, marking: bool
) -> None:
    applied = marked = 0
    for seed in range(12):
        rows, changes = draw_changes(random.Random(seed))
        if (after := followed(rows, changes, ("k",))) is None:
            continue
        mapped = Changes(tmp_path / f"{seed}", rows, changes)
        _maps_names(mapped, protocol)
        before = _logged_schema(mapped)
        if marking and protocol != "versions":
            assert mapped.lake.delta_rs is not None
            mapped.lake.policy = replace(mapped.lake.policy, rewritten_bytes=-1)
            enable_marking(mapped.lake.delta_rs, mapped.path)
        getattr(mapped, way)(definition("k"))
        assert mapped.rows() == after, f"seed {seed}"
        assert _logged_schema(mapped) == before, f"seed {seed}"
        required = DeltaTable(mapped.path).protocol().reader_features
        assert required is None or "columnMapping" in required, f"seed {seed}"
        marked += pa.table(DeltaTable(mapped.path).deletion_vectors().read_all()).num_rows
        for file in Path(mapped.path).rglob("*.parquet"):
            fields = pq.read_schema(file)
            assert fields.names == ["t", "v", "k"], f"seed {seed}"
            assert [f.metadata[b"PARQUET:field_id"] for f in fields] == [b"7", b"6", b"5"], f"seed {seed}"
        applied += 1
    assert applied > 4
    assert bool(marked) == (marking and protocol != "versions")


def test_rows_of_mapped_columns_are_found_without_a_key(tmp_path: Path) -> None:
    same = [row(1, "same")] * 3
    changes = Changes(tmp_path, same, [delete(row(1, "same")), update(row(2, "new"), row(1, "same"))])
    _maps_names(changes, "features")
    assert count_rows(changes.by_files(definition())) == (1, 0, 2, 0)
    assert changes.rows() == [row(1, "same"), row(2, "new")]


def test_flagged_rows_are_found_in_mapped_columns(tmp_path: Path) -> None:
    columns: Columns = (("k", pa.int64()), ("is_set", pa.bool_()), ("was_set", pa.bool_()))
    rows: list[Row] = [
        {"k": 1, "is_set": True},
        {"k": 2, "is_set": False, "was_set": True},
        {"k": 3, "was_set": True},
    ]
    changes = Changes(tmp_path, rows, [], columns)
    _maps_names(changes, "features")
    local = changes.lake.delta_rs
    assert local is not None
    for is_set, null_column, expected in ((True, None, [0]), (False, None, [1, 2]), (True, "was_set", [0])):
        found = local.find_flagged_rows(changes.path, Flag("is_set", is_set, null_column), None)
        assert [number for match in found for number in match.row_numbers.tolist()] == expected


def test_a_truncate_of_mapped_columns_keeps_their_names(tmp_path: Path) -> None:
    changes = Changes(tmp_path, [row(1, "before")], [Change("truncate"), insert(row(2, "after"))])
    _maps_names(changes, "features")
    before = _logged_schema(changes)
    assert count_rows(changes.by_files(definition("k")))[0] == 1
    assert (changes.rows(), _logged_schema(changes)) == ([row(2, "after")], before)

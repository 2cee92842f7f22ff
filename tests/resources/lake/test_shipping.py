"""Executors may lack pgsieve: their functions are sent with everything that they use, pickled by value."""

from __future__ import annotations

import subprocess
import sys

SENT = """
import os, pickle, sys
os.environ["A_PASSWORD"] = "of-the-environment"
from importlib import import_module
from pyspark import cloudpickle
from pgsieve.resources.lake.session import SENT_PACKAGES
from pgsieve.assets.steps.apply import key_filter_tasks, part_deciders, key_reader, moved_rows, part_writer, version_part_tasks
from pgsieve.decoding.changes.extent import Extent
from pgsieve.decoding.changes.key_filters import KeySlots
from pgsieve.assets.steps.update_transformation.changes import SentChanges, TableSlice
from pgsieve.assets.steps.update_transformation.messages import MessageFilter, StoredMessages, StoredSelection, _encode_batches
from pgsieve.assets.steps.update_transformation.relation_versions import Reading
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.decode import FilterColumns, decode_batch
from pgsieve.decoding.changes.transform import Transformation
from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.assets.steps.initial_sync import rows as copy
from pgsieve.assets.steps.slot_consumption import messages
from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.values.types import column_type
from pgsieve.resources.lake.delta.parquet_files import write_files
from functools import partial
from pgsieve.resources.lake import table_rows
from pgsieve.resources.lake.row_sources import _StoredPart
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store import Store

for package in SENT_PACKAGES:
    cloudpickle.register_pickle_by_value(import_module(package))
types = tuple(column_type(oid, -1) for oid in BUILTIN_TYPES)
names = tuple(f"c{oid}" for oid in BUILTIN_TYPES)
relation = RelationColumns(names, types)
columns = [copy.ReplicaColumn(name, type) for name, type in zip(names, types)]
a, b = names[:2]
filters = [
    parse_row_filter(text, {"t": FilterColumn("t", 25, -1, "C"), "n": FilterColumn("n", 23, -1, "")}, "t")
    for text in ("t = 'x' AND n % 2 = 1", "lower(t) ~ 'a+' AND n + 1 > 2 AND sqrt(n) < 3")
]
batch = key_reader.BatchParts(changes_schema([]), (), Extent((1,)), 1, 1)
read = FilterColumns(frozenset(), relation)
filtered = Transformation(relation, changes_schema([]), (), frozenset(), {"insert": filters}, (), read)
of_slice = TableSlice(1, ("c20",), changes_schema([]))
stored = StoredMessages((), StoredSelection(Store(), frozenset([1])))
changes = SentChanges(stored, [Reading(MessageFilter(), filtered)], [(1, 1, None)], of_slice)
encoded = stored.open_encoded([MessageFilter()], CALLING_THREAD, has_end_mark=True)
for what in sys.argv[1:]:
    sent = cloudpickle.dumps(eval(what))
    assert b"of-the-environment" not in sent, what
    pickle.dump(sent, sys.stdout.buffer)
"""

#: An executor without pgsieve, and without the driver's packages that docs/configuration.md does not require.
RECEIVED = """
import pickle, sys

ABSENT = {"pgsieve", "dagster", "obstore", "prometheus_client", "pydantic", "pyroaring", "rich", "sqlglot", "tenacity", "typer", "yaml"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for what in sys.argv[1:]:
    try:
        pickle.loads(pickle.load(sys.stdin.buffer))
    except Exception as error:
        raise SystemExit(f"{what}: {error!r}")
"""

#: The sender's program.
FUNCTIONS = (
    "lambda batch: decode_batch(batch, relation, names, names)",
    "copy.SelectedRows('', '', ('',), columns).read_batches",
    "messages.make_change_log_rows",
    "changes._change_function",
    "_StoredPart(encoded.parts, changes._change_function)",
    "partial(_encode_batches, 1)",
    "table_rows._SliceRows(Store(), (), changes_schema([]), frozenset(), ())",
    "partial(table_rows._read_files, ())",
    "key_reader.KeyReader(batch, Store(), 'lake/t', (), (), 1, 2)",
    "part_deciders.KeyDecider(batch, False)",
    "part_deciders.KeyExaminer(batch, False)",
    "part_deciders.MultisetDecider(batch, False)",
    "key_filter_tasks.SlotReader(key_reader.KeyReader(batch, Store(), 'lake/t', (), (), 1, 2), KeySlots(2, 8))",
    "key_filter_tasks.KeyFilterBuilder(KeySlots(2, 8))",
    "moved_rows.DeciderWithLinks(part_deciders.KeyDecider(batch, False), 2)",
    "moved_rows.SourceResolver(batch, 2, True)",
    "part_writer.PartWriter(batch, None, (), (), True)",
    "version_part_tasks.VersionReader(batch, Store(), 'lake/t', (), (), 1, 2)",
    "version_part_tasks.VersionDecider(batch, False)",
    "version_part_tasks.VersionPartWriter(batch, None, (), (), True)",
    "Store.from_storage(Storage.from_address('s3://lake'))",
    "lambda: write_files('s3a://lake/t', changes_schema([]), (), store=Store.from_storage(Storage.from_address('s3://lake')))",
)


def test_functions_can_be_sent_to_executors() -> None:
    command = [sys.executable, "-c", SENT, *FUNCTIONS]
    sent = subprocess.run(command, capture_output=True, check=False)
    assert sent.returncode == 0, sent.stderr.decode()
    command = [sys.executable, "-c", RECEIVED, *FUNCTIONS]
    received = subprocess.run(command, input=sent.stdout, capture_output=True, check=False)
    assert received.returncode == 0, received.stderr.decode()

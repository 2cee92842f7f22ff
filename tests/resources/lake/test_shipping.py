"""Executors may not have pgsieve: what they run is sent to them with all that it uses, pickled by value."""

from __future__ import annotations

import subprocess
import sys

import pytest

SENT = """
from importlib import import_module
from pyspark import cloudpickle
from pgsieve.resources.lake.session import SHIPPED
from pgsieve.assets.steps.update_transformation import changes
from pgsieve.assets.steps.initial_sync import rows as copy
from pgsieve.assets.steps.slot_consumption import messages
from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.values.types import column_type

for package in SHIPPED:
    cloudpickle.register_pickle_by_value(import_module(package))
types = tuple(column_type(oid, -1) for oid in BUILTIN_TYPES)
names = tuple(f"c{oid}" for oid in BUILTIN_TYPES)
relation = RelationColumns(names, types)
columns = [copy.ReplicaColumn(name, type) for name, type in zip(names, types)]
cloudpickle.dumps({what})
"""


@pytest.mark.parametrize(
    "what",
    [
        "lambda batches: changes._decoded(batches, relation, names, names)",
        "lambda: copy.copied_batches('', '', '', columns)",
        "messages.change_log_rows",
    ],
)
def test_what_executors_run_can_be_sent_to_them(what: str) -> None:
    command = [sys.executable, "-c", SENT.replace("{what}", what)]
    sent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert sent.returncode == 0, sent.stderr

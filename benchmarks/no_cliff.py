"""Measures special kinds of changes, compared with plain updates of the same size in the same run.

Each kind has a table of `--rows` rows, of which `--changes` are changed. Slot consumption, UPDATE
transformation and apply are measured `--times` times after a warm-up; the shortest time counts. The tables
with large (TOAST) values have an eighth of the rows; updates that do not send the value are compared with
updates that do. No kind should take twice the time of the kind that it is compared with.

    python benchmarks/no_cliff.py --rows 1000000 --changes 100000 --master local[2]
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.changes.deleted_rows import DELETED_ROW_COLUMNS
from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.work import measure_work

_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "autovacuum": "off",
}
_UPDATE = "update {table} set amount = amount + 1 where n % {every} = 0"
#: Deletes other rows each time.
_DELETE = (
    "delete from {table} where n in (select n from {table} order by n % {every}, n limit {rows} / {every})"
)
_PLAIN, _LARGE = "plain updates", "updates of a large value"
#: A large value: it is not compressed, and too large to be stored in the row.
_BODY = "repeat(md5(i::text), 100)"


@dataclass(frozen=True)
class Kind:
    """A kind of change: a table, the statement that changes it, and the kind to compare with (`peer`).

    The table has a key and one more column, each with its declaration and its value for row `i`. `share`
    divides the numbers of rows and changes. `layout` is the replica's, as in pgsieve.yaml. If `maps_names`, a user has
    let Delta map the names of the replica's columns.
    """

    key: str = "id bigint primary key"
    key_of: str = "i"
    more: str = "note text"
    more_of: str = "'note ' || i % 1000"
    alter: str = "replica identity default"
    change: str = _UPDATE
    share: int = 1
    layout: Mapping[str, object] = field(default_factory=dict)
    maps_names: bool = False
    peer: str = _PLAIN


_TOAST = {"more": "body text storage external", "more_of": _BODY, "share": 8}
KINDS = {
    _PLAIN: Kind(),
    "key moves": Kind(change="update {table} set id = id + {rows} * 10 where n % {every} = 0"),
    "a float key": Kind("id float8 primary key", "i + 0.5"),
    "an array key": Kind("id int[] primary key", "array[i, i % 7]"),
    "TRUNCATE": Kind(change="truncate {table}; insert into {table} {first}"),
    "a name with a space": Kind(more='"Line No" int', more_of="i % 1000"),
    "mapped names": Kind(maps_names=True),
    "metadata columns": Kind(
        layout={"columns": {kind: f"_{kind}" for kind in TYPE_OID_BY_KIND if kind not in DELETED_ROW_COLUMNS}}
    ),
    "deletes": Kind(change=_DELETE),
    "soft deletes": Kind(layout={"deletes": "soft"}, change=_DELETE, peer="deletes"),
    "soft deletes, updates": Kind(layout={"deletes": "soft"}),
    "a change data feed": Kind(layout={"properties": {"delta.enableChangeDataFeed": True}}),
    "no key": Kind("id bigint", alter="replica identity full"),
    _LARGE: Kind(
        **_TOAST, change=_UPDATE.replace(" where", ", body = repeat(md5(random()::text), 100) where")
    ),
    "unsent TOAST": Kind(**_TOAST, peer=_LARGE),
}


def _ignore_line(_: str) -> None:
    """A log without output."""


class TableOfKind:
    """The table of a kind, its subscription and its lake."""

    def __init__(
        self, kind: Kind, number: int, folder: Path, publisher: EmbeddedServer, options: argparse.Namespace
    ) -> None:
        self._publisher, self._kind, self._table = publisher, kind, f"t{number}"
        rows, changes = options.rows // kind.share, options.changes // kind.share
        row = f"select {kind.key_of}, i, (i % 97) / 4.0, {kind.more_of} from generate_series(1, {{}}) i"
        self._change = kind.change.format(
            table=self._table, rows=rows, every=max(1, rows // changes), first=row.format(changes)
        )
        with self._connect() as source:
            source.execute(f"create table {self._table} ({kind.key}, n int, amount numeric, {kind.more})")
            source.execute(f"insert into {self._table} {row.format(rows)}")
            source.execute(f"alter table {self._table} {kind.alter}")
            source.execute(f"create publication {self._table} for table {self._table}")
        self._subscription, self._lake = self._open_lake(folder, options.master)
        copy_tables(
            self._subscription, self._lake, find_tables_to_copy(self._subscription, self._lake), _ignore_line
        )
        if kind.maps_names:
            replica = self._lake.paths.replica(self._table, "public", self._table)
            mapping = "set tblproperties ('delta.columnMapping.mode' = 'name')"
            self._lake.spark.sql(f"alter table delta.{quote_name(replica)} {mapping}")

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self._publisher.conninfo(), autocommit=True)

    def _open_lake(self, folder: Path, master: str) -> tuple[Subscription, Lake]:
        path, name = folder / f"{self._table}.yaml", self._table
        content = {
            "lake": f"./lake_{name}",
            "sources": {name: {"conninfo": self._publisher.conninfo()}},
            "subscriptions": {name: {"source": name, "publications": [name], "layout": self._kind.layout}},
            "spark": {"master": master},
        }
        path.write_text(yaml.safe_dump(content))
        project = build_project(load_config(path))
        return project.subscriptions[name], project.lake.open()

    def seconds(self) -> tuple[list[float], str]:
        """Change the table, and replicate the changes; the seconds of the three steps, and the apply's engine."""
        with self._connect() as source:
            source.execute(self._change)
        subscription, lake, took = self._subscription, self._lake, []
        for step in (
            lambda: drain_slot(subscription.slot_stream, lake, [subscription], _ignore_line),
            lambda: transform(subscription, lake, _ignore_line),
            lambda: apply(subscription, lake, _ignore_line),
        ):
            began = time.monotonic()
            with measure_work() as work:
                result = step()
            took.append(time.monotonic() - began)
        (applied,) = result.tables.values()
        assert not applied.problem, applied.problem
        return took, work.engine_text


def main() -> None:
    """Measure the kinds in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    if any(KINDS[kind].change == _DELETE for kind in options.kinds):
        rounds = options.times + 1
        if options.changes * rounds > options.rows:
            parser.error(f"{rounds} times {options.changes} deleted rows are more than {options.rows} rows")
    shown = Table("what", "slot", "transformation", "apply", "seconds", "ratio", "applied by")
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=_SETTINGS) as publisher:
            wanted = [kind for kind in KINDS if kind in options.kinds or kind in _peers(options.kinds)]
            sites = {
                kind: TableOfKind(KINDS[kind], number, folder, publisher, options)
                for number, kind in enumerate(wanted)
            }
            taken = {kind: list[tuple[list[float], str]]() for kind in wanted}
            for _ in range(options.times + 1):
                for kind, site in sites.items():
                    taken[kind].append(site.seconds())
    least = {kind: min(runs[1:], key=lambda run: sum(run[0])) for kind, runs in taken.items()}
    for kind, (took, engine) in least.items():
        peer = sum(least[KINDS[kind].peer if kind != _LARGE else _LARGE][0])
        seconds = (*took, sum(took), sum(took) / peer)
        shown.add_row(kind, *(f"{number:.2f}" for number in seconds), engine)
    Console(width=120).print(shown)


def _peers(kinds: list[str]) -> set[str]:
    return {KINDS[kind].peer for kind in kinds}


if __name__ == "__main__":
    main()

"""Every command, program and query of the site's pages is run as written, or listed with the reason why it is not.

The blocks of a page are run in order, in a folder with a pgsieve.yaml, with a database that has the tables of the pages. Placeholders
for something of the reader's own (a host, an LSN, a version) are replaced.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from textwrap import dedent

import psycopg
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots, own_database
from tests.fixtures.spark_servers import free_port
from tests.test_docs import FENCE, PAGES, ROOT

_numbers = itertools.count(1)
TABLES = """
create table customers (id int primary key, customer_id int, name text);
create table orders (id int primary key, order_id int, customer_id int, region text not null, amount numeric(10,2));
create table lines (order_id int primary key, article text);
alter table orders replica identity full;
insert into customers values (1, 7, 'Anna'), (2, 8, 'Ben');
insert into orders values (1, 1, 7, 'EMEA', 10.50), (2, 2, 8, 'EMEA', 20), (3, 3, 8, 'APAC', 30);
insert into lines values (1, 'pen'), (2, 'ink');
create publication sales for table orders where (region = 'EMEA'), customers, lines;
"""
#: Statements after the copy, so that each replica has the versions 0 and 1, and the histories have changes.
CHANGES = """
update orders set amount = 11 where id = 1;
delete from orders where id = 2;
insert into orders values (4, 4, 7, 'EMEA', 7);
update customers set name = 'Benjamin' where id = 2;
update lines set article = 'pencil' where order_id = 1;
"""
CONFIGURATION = """
lake: ./lake
spark:
  master: local[2]
  engine: "off"
  conf:
    spark.driver.memory: 1g
    spark.sql.shuffle.partitions: "1"
sources: {shop: {conninfo: "host=db dbname=shop user=pgsieve"}}
subscriptions: {sales: {source: shop, publications: [sales]}}
"""


@contextmanager
def _collector() -> Iterator[tuple[int, list[str]]]:
    """A server that accepts every POST. Yields its port, and the list of requested paths."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1], received
        server.shutdown()
        thread.join()


@dataclass
class World:
    """A folder with a pgsieve.yaml and a lake, the replicated database, and replacements for the pages' placeholders."""

    folder: Path
    database: psycopg.Connection
    conninfo: str
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": programs,
            "DAGSTER_HOME": str(self.folder),
            "SHOP_PASSWORD": "none is asked for",
        }

    def as_read(self, text: str, further: Mapping[str, str] = {}) -> str:
        """The text with the placeholders replaced by the reader's own values."""
        for written, own in {**self.replaced, **further}.items():
            text = text.replace(written, own)
        return text

    def configure(self, text: str) -> None:
        """Write pgsieve.yaml with the database as its source. Small work uses no JVM."""
        written = {**yaml.safe_load(CONFIGURATION), **yaml.safe_load(text)}
        for source in written["sources"].values():
            source["conninfo"] = self.conninfo
            source.pop("password", None)
        (self.folder / "pgsieve.yaml").write_text(yaml.safe_dump(written))

    def shell(self, text: str) -> None:
        """Run lines of a shell. Each must succeed."""
        self._run(["bash", "-euo", "pipefail", "-c", text])

    def python(self, text: str) -> None:
        """Run a Python program."""
        self._run([sys.executable, "-c", text])

    def traced(self, text: str) -> None:
        """Run lines of a shell with a collector of traces. It must get some."""
        with _collector() as (port, received):
            self.shell(text.replace("localhost:4318", f"127.0.0.1:{port}"))
        assert "/v1/traces" in received

    def ended(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a program in the folder. Return its result and output."""
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def _run(self, command: list[str]) -> None:
        done = self.ended(command)
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"


Preparation = Callable[[World], None]


@dataclass(frozen=True)
class NotRun:
    """The reason why a block is not run."""

    reason: str


@dataclass(frozen=True)
class Run:
    """How to run a block: the preparation, the replacements of words, and the code before and after it."""

    way: Callable[[World, str], object]
    prepared: Preparation | None = None
    replaced: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""

    def __call__(self, world: World, text: str) -> None:
        if self.prepared:
            self.prepared(world)
        whole = "\n".join([dedent(self.before), world.as_read(text, self.replaced), dedent(self.after)])
        self.way(world, whole)


def _with_a_port(world: World) -> None:
    timed = f"timeout --signal INT 20 pgsieve ui --port {free_port()}"
    world.replaced["pgsieve ui "] = f"{timed} || test $? = 124 "


#: A session like those that pgsieve starts.
SESSION = """
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
spark = build_project(load_config()).lake.engine.session
"""


def _postgres(world: World, text: str) -> None:
    world.database.execute(text)


def _spark_sql(world: World, text: str) -> None:
    statements = [statement for statement in text.split(";") if statement.strip()]
    world.python(f"{SESSION}\nfor statement in {statements!r}:\n    print(spark.sql(statement).collect())")


def _without_publication(world: World) -> None:
    world.database.execute("drop publication sales")


def _without_slot(world: World) -> None:
    """As on a server that was made by pg_upgrade, or restored from a dump."""
    world.database.execute("select pg_drop_replication_slot('pgsieve_shop')")


def _another_tools_slot(world: World) -> None:
    world.database.execute("select pg_create_logical_replication_slot('debezium', 'pgoutput')")


def _textfile_collector(world: World) -> None:
    (world.folder / "node_exporter").mkdir()


def _another_table_to_apply(world: World) -> None:
    world.database.execute("insert into customers values (3, 9, 'Cleo')")


def _another_amount(world: World) -> None:
    world.database.execute("update orders set amount = 12 where id = 1")


def _with_metadata_columns(world: World) -> None:
    columns = "{commit_time: _committed, operation: _operation, copy_time: _copied}"
    layout = f"{{columns: {columns}}}"
    world.configure(f"subscriptions: {{sales: {{source: shop, publications: [sales], layout: {layout}}}}}")
    _another_amount(world)
    world.shell("pgsieve run")


def _with_deletion_vectors(world: World) -> None:
    """Treat the replica as large."""
    limits = "{spark.pgsieve.smallBytes: -1, spark.pgsieve.rewrittenBytes: -1}"
    world.configure(f"spark: {{master: 'threads[2]', conf: {limits}}}")
    _another_amount(world)
    world.shell("pgsieve run && ls lake/sales/public/orders/deletion_vector_*")
    world.configure(CONFIGURATION)


def _with_soft_deletes(world: World) -> None:
    layout = "{deletes: soft}"
    world.configure(f"subscriptions: {{sales: {{source: shop, publications: [sales], layout: {layout}}}}}")
    world.database.execute("delete from orders where id = 1")
    world.shell("pgsieve run")


def _with_a_whole_history(world: World) -> None:
    world.configure("subscriptions: {sales: {source: shop, publications: [sales], history: {initial: true}}}")
    world.shell("pgsieve resync sales public.orders && pgsieve run")


def _with_versions(world: World) -> None:
    world.configure("subscriptions: {sales: {source: shop, publications: [sales], history: scd2}}")
    _another_amount(world)
    world.shell("pgsieve run")


def _disabled_by_a_value(world: World) -> None:
    """A transaction disables a subscription. Its LSN replaces the page's."""
    world.configure("subscriptions: {sales: {source: shop, publications: [sales], disable_on_error: true}}")
    world.database.execute("insert into orders values (9, 9, 9, 'EMEA', 'NaN')")
    done = world.ended(["pgsieve", "run"])
    assert done.returncode == 1, done.stdout + done.stderr
    lsn = re.search(r"finished at ([0-9A-F]+/[0-9A-F]+)", done.stdout + done.stderr)
    assert lsn, done.stdout + done.stderr
    world.replaced["0/14C0A38"] = lsn[1]


def _an_lsn_of_a_cut(world: World) -> None:
    cuts = DeltaTable(str(world.folder / "lake/sales/_cuts")).to_pyarrow_table()
    world.replaced["16/B374D848"] = format_lsn(max(cuts["lsn"].to_pylist()))


def _a_moment_amid_the_changes(world: World) -> None:
    """An LSN and a time after the UPDATE and the DELETE of orders, and before the INSERT."""
    history = DeltaTable(str(world.folder / "lake/sales/_changes/public/orders")).to_pyarrow_table()
    _, deleted, inserted, *_ = history.sort_by("commit_lsn").to_pylist()
    world.replaced["16/B374D848"] = format_lsn(inserted["commit_lsn"])
    world.replaced["2026-03-01 12:00:00+00:00"] = deleted["commit_time"].isoformat(" ")


def _project_of_dg(world: World) -> None:
    """An empty project of `dg` whose package can be imported."""
    (world.folder / "pyproject.toml").write_text(
        '[project]\nname = "shop"\nversion = "1"\n[tool.dg]\ndirectory_type = "project"\n'
        '[tool.dg.project]\nroot_module = "shop"\n'
    )
    (world.folder / "shop" / "defs").mkdir(parents=True)
    for package in ("shop", "shop/defs"):
        (world.folder / package / "__init__.py").touch()


_SHELL = Run(World.shell)
_PYTHON = Run(World.python)
_NO_INDEX = "pgsieve is not in a package index; tests/test_distribution.py installs the wheel"
_DEVELOPERS = "for developers of pgsieve: CI runs `make setup`, `make check` and `make test`"
#: An earlier version of a replica, as created by these few changes.
_VERSION = {"AS OF 41": "AS OF 1", "AS OF 17": "AS OF 1"}

#: By page, how to run its blocks, by their first lines and in order.
PAGE_BLOCKS: dict[str, list[tuple[str, Run | NotRun]]] = {
    "README.md": [
        ("make demo", NotRun("tests/test_tutorial.py runs the demo; `make test` is what runs this test")),
        ("# pgsieve.yaml", Run(World.configure)),
        (
            "pgsieve validate",
            # The last one runs until it is interrupted; tests/orchestration/test_browser.py uses it.
            Run(World.shell, _with_a_port),
        ),
    ],
    "CONTRIBUTING.md": [
        ("def test_rows_inserted", NotRun("the shape of a test; tests/replication/ has hundreds of it")),
        ("PGSIEVE_SEED=", NotRun(_DEVELOPERS)),
        ("python -m tests.recordings.record", NotRun(_DEVELOPERS)),
        ("python -m tests.fuzzing", NotRun(_DEVELOPERS)),
    ],
    "docs/backup.md": [
        ("pgsieve status", _SHELL),
        ("pgsieve resync sales", _SHELL),
        ("pgsieve check", _SHELL),
        (
            "pgsieve restore sales",
            Run(World.shell, _a_moment_amid_the_changes, after="ls sales-before/sales/public/orders"),
        ),
    ],
    "docs/cloud-databases.md": [
        ("CREATE ROLE pgsieve", Run(_postgres, _without_publication)),
        ("GRANT rds_replication", NotRun("a role of Amazon RDS")),
        ("ALTER USER pgsieve", Run(_postgres)),
        ("ALTER ROLE pgsieve", Run(_postgres)),
        ("pgsieve validate", _SHELL),
    ],
    "docs/connections.md": [("ssh -N", NotRun("needs an SSH server in front of a database"))],
    "docs/dagster.md": [
        ("pip install", NotRun(_NO_INDEX)),
        ("import dagster as dg", Run(World.python, replaced={"[...]": "[]", "{...}": "{}"})),
        ("dg scaffold defs", Run(World.shell, _project_of_dg)),
        (
            "@dg.asset(",
            Run(
                World.python,
                _a_moment_amid_the_changes,
                before="import dagster as dg, pgsieve",
                after="""
                    defs = dg.Definitions.merge(
                        pgsieve.build_definitions("pgsieve.yaml"), dg.Definitions(assets=[revenue])
                    )
                    job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection={revenue.key})
                    assert job.execute_in_process(resources=defs.resources).success
                """,
            ),
        ),
        ("class Replicas(", Run(World.python, before="import dagster as dg, pgsieve")),
        ("import os", NotRun("needs dagster-slack, and would send to Slack")),
    ],
    "docs/history.md": [
        ("SELECT id, amount, _operation", Run(_spark_sql, _with_metadata_columns)),
        ("SELECT id, amount, _deleted_at", Run(_spark_sql, _with_soft_deletes)),
        ("SELECT commit_time AS copied", Run(_spark_sql, _with_a_whole_history)),
        ("SELECT id, amount, valid_from", Run(_spark_sql, _with_versions)),
        ("SELECT * FROM (", Run(_spark_sql)),
    ],
    "docs/migrating.md": [
        ("lake: ./lake", Run(World.configure)),
        ("pgsieve validate", _SHELL),
        ("SELECT slot_name", Run(_postgres, _another_tools_slot)),
    ],
    "docs/monitoring.md": [
        (
            "pgsieve run",
            Run(
                World.shell,
                _textfile_collector,
                replaced={"/var/lib/node_exporter": "node_exporter"},
                after="grep -q '^pgsieve_source_up' node_exporter/pgsieve.prom",
            ),
        ),
        (
            "pgsieve run --json",
            Run(World.shell, _another_amount, after='grep -q "updates_not_sent" run.json'),
        ),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", Run(World.traced, _another_table_to_apply)),
    ],
    "docs/operations.md": [
        ("CREATE ROLE pgsieve", Run(_postgres)),
        # Only the first line is about packages; it needs a package index with pgsieve.
        ("pip download", Run(World.shell, replaced={"pip download": "true"})),
        ("pip install", Run(World.shell, replaced={"pip install": "true"})),
        ("pgsieve resync sales ", _SHELL),
        ("pgsieve skip sales", Run(World.shell, _disabled_by_a_value)),
        ("from pgsieve import read_at_cut", Run(World.python, _an_lsn_of_a_cut, before=SESSION)),
        ("SELECT lsn, tables", Run(_spark_sql, replaced=_VERSION)),
        ("SELECT commit_time", Run(_spark_sql)),
    ],
    "docs/reading.md": [
        ("SELECT * FROM delta.", Run(_spark_sql, replaced=_VERSION)),
        (
            "import polars",
            Run(
                World.python,
                _with_deletion_vectors,
                after="assert [len(rows.collect()) for rows in (orders, before)] == [2, 2]",
            ),
        ),
        (
            "from deltalake",
            Run(World.python, replaced={"s3://bucket/": ""}, after="assert rows.read_all().num_rows == 2"),
        ),
        ("SELECT * FROM delta_scan", NotRun("DuckDB fetches the extension from a server of its own")),
        ("import duckdb", _PYTHON),
        ("CALL lake.system.register_table", NotRun("needs a Trino with a metastore")),
        ("from pgsieve import read_at_cut", Run(World.python, before=SESSION)),
        ("import polars", Run(World.python, after="assert len(orders.collect()) == 2")),
        (
            "pgsieve read sales",
            Run(World.shell, _a_moment_amid_the_changes, after="test $(grep -c EMEA orders.csv) = 1"),
        ),
        (
            "from pgsieve import read_at",
            Run(World.python, before=SESSION, after='assert tables["public.orders"].count() == 1'),
        ),
    ],
    "docs/row-filters.md": [
        ("lake: ./lake", Run(World.configure)),
        ("pgsieve run wide", Run(World.shell, after="test -d lake/emea/public/orders")),
    ],
    "docs/upgrade-postgresql.md": [
        ("pgsieve run", _SHELL),
        ("pgsieve drop sales", _SHELL),
        ("lake: ./lake-18", Run(World.configure)),
        ("pgsieve validate", _SHELL),
        ("pgsieve drop sales --leave-slot", Run(World.shell, _without_slot)),
    ],
}
#: tests/test_tutorial.py runs each of them as a whole.
TUTORIALS = {"docs/tutorial-demo.md", "docs/tutorial-database.md"}
#: tests/test_docs.py reads the YAML blocks of all pages.
LANGUAGES = {"console", "sh", "bash", "sql", "python"}


def _blocks(page: str) -> list[tuple[str, str]]:
    """The blocks of a page that are run or listed, as (language, text)."""
    listed = [beginning for beginning, _ in PAGE_BLOCKS.get(page, [])]
    blocks = [(m[2], dedent(m[3])) for m in FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))]
    return [
        (language, text)
        for language, text in blocks
        if language in LANGUAGES or (language == "yaml" and text.startswith(tuple(listed) or ("\0",)))
    ]


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_each_block_is_run_or_listed_with_a_reason(page: str) -> None:
    if page in TUTORIALS:
        return
    texts, listed = [text for _, text in _blocks(page)], PAGE_BLOCKS.get(page, [])
    assert [
        text for text in texts if not text.startswith(tuple(beginning for beginning, _ in listed) or "\0")
    ] == []
    assert len(texts) == len(listed)
    assert all(text.startswith(beginning) for text, (beginning, _) in zip(texts, listed, strict=True))


def test_every_make_that_a_page_names_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets, page.name


@contextmanager
def _world(server: EmbeddedServer, folder: Path) -> Iterator[World]:
    """A database that was replicated, then changed and replicated again."""
    name = f"documented_{next(_numbers)}"
    with own_database(server, name) as database:
        try:
            database.execute(TABLES)
            world = World(folder, database, server.conninfo(dbname=name))
            world.replaced["`/data/lake/"] = f"`{folder}/lake/"
            world.configure(CONFIGURATION)
            world.shell("pgsieve run")
            # Each statement is its own commit, so that there are moments between them.
            for change in CHANGES.split(";")[:-1]:
                database.execute(change)
            world.shell("pgsieve run")
            yield world
        finally:
            drop_slots(database)
            database.execute("drop publication if exists sales; drop publication if exists pgsieve_shop")
            if database.execute("select from pg_roles where rolname = 'pgsieve'").rowcount:
                database.execute("drop owned by pgsieve; drop role pgsieve")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.parametrize(
    "page", [p for p, blocks in PAGE_BLOCKS.items() if any(isinstance(b, Run) for _, b in blocks)]
)
def test_the_blocks_of_a_page_run_in_order(
    page: str, publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: every command of a page runs, and some start a JVM."""
    if publisher_server.version < 15:
        pytest.skip("row filters of the server need version 15")
    with _world(publisher_server, tmp_path) as world:
        for (_, text), (_, action) in zip(_blocks(page), PAGE_BLOCKS[page], strict=True):
            if isinstance(action, Run):
                action(world, text)

"""A lake on S3 from validation to dropping, by the command line. Its secret appears nowhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import yaml
from deltalake import DeltaTable, QueryBuilder
from deltalake.fs import DeltaStorageHandler

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.s3_server import KEY, REGION, SECRET, S3Server
from tests.fixtures.servers import drop_slots

#: Settings with which Spark writes every batch.
BY_SPARK = {"spark.pgsieve.smallBytes": -1}
KEYS = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database on_s3")
        with psycopg.connect(publisher_server.conninfo(dbname="on_s3"), autocommit=True) as connection:
            connection.execute("create table items (id int primary key, region text)")
            connection.execute("insert into items select i, 'EMEA' from generate_series(1, 10) i")
            connection.execute("insert into items values (11, 'APAC')")
            connection.execute("create table log (line text)")
            connection.execute("insert into log values ('a'), ('a'), (null)")
            connection.execute("alter table items replica identity full")
            connection.execute("alter table log replica identity full")
            connection.execute("create table plain (id int primary key, line text)")
            connection.execute("insert into plain values (1, 'a'), (2, 'b')")
            connection.execute("create publication p for table items where (region <> 'APAC'), log, plain")
            connection.execute("create publication q for table plain")
            yield connection
            drop_slots(connection)
        admin.execute("drop database on_s3 with (force)")


class Pgsieve:
    """Runs commands on a lake on S3. Records their output, and the command lines of their processes."""

    def __init__(self, folder: Path, lake: str, store: S3Server, source: str, publication: str) -> None:
        self.folder, self.path, self.seen = folder, folder / "pgsieve.yaml", ""
        self._output = folder / "printed"
        events = folder / "events"
        events.mkdir()
        self._written: dict[str, Any] = {
            "lake": lake,
            "storage": {
                "endpoint": store.url,
                "region": REGION,
                "access_key_id": KEY,
                "secret_access_key": "${STORE_SECRET}",
            },
            "spark": {
                "master": "local[2]",
                "conf": {
                    **SMALL_DATA,
                    "spark.eventLog.enabled": "true",
                    "spark.eventLog.dir": events.as_uri(),
                    "spark.eventLog.compress": "false",
                },
            },
            "sources": {"shop": {"conninfo": source}},
            "subscriptions": {"sales": {"source": "shop", "publications": [publication]}},
        }
        self.configure()

    def configure(self, **conf: str) -> None:
        """Write pgsieve.yaml, with additional settings of Spark."""
        spark = {**self._written["spark"], "conf": {**self._written["spark"]["conf"], **conf}}
        self.path.write_text(yaml.safe_dump({**self._written, "spark": spark}))

    def start(self, *command: str, **environment: str) -> BaseProcess:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK", "AWS_"))}
        return commands.start(
            ["--verbose", *command, "-c", str(self.path)],
            self._output,
            environment={**clean, "STORE_SECRET": SECRET, **environment},
        )

    def __call__(self, *command: str, ends: int = 0, **environment: str) -> str:
        before = len(self.printed)
        started = self.start(*command, **environment)
        self._watch(started)
        printed = self.printed[before:]
        self.seen += printed
        assert started.exitcode == ends, printed
        return printed

    @property
    def printed(self) -> str:
        """The output of all commands."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def left(self) -> bytes:
        """The contents of the files that the commands left on this machine."""
        return b"".join(path.read_bytes() for path in self.folder.rglob("*") if path.is_file())

    def _watch(self, started: BaseProcess) -> None:
        """Record the command lines of a command's processes until it ends: every user of a machine can read them."""
        titles, deadline = set[str](), time.monotonic() + 600
        while started.is_alive() and time.monotonic() < deadline:
            with suppress(psutil.Error):
                for each in psutil.Process(started.pid).children(recursive=True):
                    titles.add(" ".join(each.cmdline()))
            started.join(0.1)
        self.seen += "\n".join(titles)


@pytest.fixture
def pgsieve(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    s3_server: S3Server,
    s3_folder: str,
    publisher_server: EmbeddedServer,
    database: object,
) -> Pgsieve:
    source = publisher_server.conninfo(dbname="on_s3")
    return Pgsieve(tmp_path, s3_folder, s3_server, source, request.param)


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pgsieve", ["q"], indirect=True)
def test_a_lake_on_s3_is_followed_and_dropped(
    pgsieve: Pgsieve, database: psycopg.Connection, s3_server: S3Server, s3_folder: str
) -> None:
    """It takes long: three commands, each a process, and an S3 server."""
    pgsieve("run", JAVA_HOME="/none")  # a small copy needs no JVM
    path = f"{s3_folder}/sales/public/plain"
    assert ids_in(path, s3_server) == [1, 2]
    following = pgsieve.start("run", "--follow")
    try:
        database.execute("insert into plain values (3, 'c')")
        database.execute("delete from plain where id = 2")
        deadline = time.monotonic() + 300
        while ids_in(path, s3_server) != [1, 3]:
            assert time.monotonic() < deadline
            assert following.is_alive(), pgsieve.printed
            time.sleep(0.2)
    finally:
        following.terminate()
        following.join(300)
    assert following.exitcode == 0, pgsieve.printed
    pgsieve("drop", "sales", "--delete-tables", JAVA_HOME="/none")
    assert not DeltaTable.is_deltatable(path, s3_server.delta_rs)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pgsieve", ["p"], indirect=True)
def test_a_lake_that_is_copied_from_a_folder_to_s3_continues_there(
    pgsieve: Pgsieve, database: psycopg.Connection, s3_server: S3Server, s3_folder: str, tmp_path: Path
) -> None:
    """It takes long: ten commands. The lake's files are copied object by object; credentials come only from the environment."""
    database.execute("""create table "Größe ""x""/y" (id int primary key, note text)""")
    database.execute("""insert into "Größe ""x""/y" values (1, 'a')""")
    database.execute("""alter publication p add table "Größe ""x""/y" """)
    on_s3 = yaml.safe_load(pgsieve.path.read_text())
    in_a_folder = {**on_s3, "lake": str(tmp_path / "a lake")}
    in_a_folder.pop("storage")
    pgsieve.path.write_text(yaml.safe_dump(in_a_folder))
    pgsieve("run", JAVA_HOME="/none")
    database.execute("insert into items values (12, 'EMEA'); update plain set line = 'c' where id = 1")
    pgsieve("run", JAVA_HOME="/none")
    store = pafs.S3FileSystem(
        access_key=KEY, secret_key=SECRET, endpoint_override=s3_server.url, region=REGION
    )
    pafs.copy_files(str(tmp_path / "a lake"), s3_folder.removeprefix("s3://"), destination_filesystem=store)
    on_s3.pop("storage")
    # A secret in Spark's own settings is in the command line of a JVM, but in no record and no message.
    settings = {**on_s3["spark"]["conf"], "spark.hadoop.fs.s3a.secret.key": "${STORE_SECRET}"}
    pgsieve.path.write_text(yaml.safe_dump({**on_s3, "spark": {**on_s3["spark"], "conf": settings}}))
    database.execute("""update "Größe ""x""/y" set note = 'b'; delete from items where id = 3""")
    environment = {**s3_server.environment, "JAVA_HOME": "/none"}
    assert "copied" not in pgsieve("run", **environment)
    assert ids_in(f"{s3_folder}/sales/public/items", s3_server) == [1, 2, *range(4, 11), 12]
    pgsieve("check", **environment)
    pgsieve("maintain", **environment)
    pgsieve("check", **environment)
    on_s3["spark"]["conf"] |= BY_SPARK
    pgsieve.path.write_text(yaml.safe_dump(on_s3))
    database.execute("truncate items; insert into items values (1, 'EMEA')")
    assert "spark.sql.extensions" not in pgsieve.seen
    pgsieve("run", **s3_server.environment)  # Spark takes the credentials from the same place as delta-rs
    assert "spark.sql.extensions" in pgsieve.seen
    pgsieve("check", **environment)
    pgsieve("drop", "sales", "--delete-tables", **environment)
    assert SECRET not in pgsieve.seen
    assert SECRET.encode() not in pgsieve.left


class Profiles:
    """The files of AWS' tools, and a lake whose settings come from there as far as `storage` does not set them."""

    def __init__(self, pgsieve: Pgsieve, home: Path) -> None:
        self.pgsieve, self.folder = pgsieve, home / ".aws"
        self.folder.mkdir(parents=True)
        self.environment = {"HOME": str(home), "AWS_PROFILE": "lake", "STORE_SECRET": ""}
        self.settings = yaml.safe_load(pgsieve.path.read_text())
        self.settings.pop("storage")

    def write(self, *, credentials: str = "", config: str = "", **storage: str) -> None:
        others = KEYS.replace(KEY, "AKOTHER")
        (self.folder / "credentials").write_text(f"[default]\n{others}[lake]\n{credentials}")
        (self.folder / "config").write_text(f"[default]\nregion = eu-other-1\n{config}")
        settings = {**self.settings, "storage": storage} if storage else self.settings
        self.pgsieve.path.write_text(yaml.safe_dump(settings))

    def __call__(self, *command: str, ends: int = 0, **environment: str) -> str:
        return self.pgsieve(*command, ends=ends, **{**self.environment, **environment})


@pytest.fixture
def profiles(pgsieve: Pgsieve, tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    """The files are outside of the folder in which commands may leave files."""
    return Profiles(pgsieve, tmp_path_factory.mktemp("home"))


@pytest.mark.long
@pytest.mark.parametrize("pgsieve", ["p"], indirect=True)
def test_a_profile_of_aws_tools_is_read_also_with_an_endpoint(
    pgsieve: Pgsieve,
    database: psycopg.Connection,
    s3_server: S3Server,
    s3_folder: str,
    profiles: Profiles,
) -> None:
    """It takes long: several commands, each a process, and an S3 server."""
    items = f"{s3_folder}/sales/public/items"
    region = f"[profile lake]\nregion = {REGION}\n"
    profiles.write(credentials=KEYS, config=region, endpoint=s3_server.url)
    assert "no problems" in profiles("validate", JAVA_HOME="/none")
    profiles("run", JAVA_HOME="/none")
    database.execute("delete from items where id = 3")
    services = f"[services own]\ns3 =\n  endpoint_url = {s3_server.url}\n"
    profiles.write(credentials=KEYS, config=f"{region}services = own\n{services}")
    profiles("run", JAVA_HOME="/none")
    assert ids_in(items, s3_server) == [1, 2, *range(4, 11)]
    profiles("check", JAVA_HOME="/none")
    assert SECRET not in pgsieve.seen
    assert SECRET.encode() not in pgsieve.left


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("pgsieve", ["p"], indirect=True)
def test_a_profiles_role_is_reported_as_unused_if_an_endpoint_is_set(
    pgsieve: Pgsieve, s3_server: S3Server, profiles: Profiles
) -> None:
    role = "[profile lake]\nrole_arn = arn:aws:iam::1:role/lake\nsource_profile = default\n"
    profiles.write(config=role, endpoint=s3_server.url, region=REGION)
    for command in ("validate", "run"):
        output = profiles(command, ends=2, JAVA_HOME="/none")
        assert "there are no credentials for the store" in output
        assert "no role, single sign-on or process is used then" in output


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pgsieve", ["p"], indirect=True)
def test_spark_finds_the_profile_that_delta_rs_does(
    pgsieve: Pgsieve,
    database: psycopg.Connection,
    s3_server: S3Server,
    s3_folder: str,
    profiles: Profiles,
) -> None:
    """It takes long: three commands, each a process; one of them starts a JVM."""
    own = f"region = {REGION}\nendpoint_url = {s3_server.url}\n"
    profiles.write(credentials=KEYS, config=f"[profile lake]\n{own}")
    profiles("run", JAVA_HOME="/none")
    database.execute("truncate items; insert into items values (1, 'EMEA')")
    profiles.settings["spark"]["conf"] |= BY_SPARK
    profiles.write(credentials=KEYS, config=f"[profile lake]\n{own}")
    profiles("run")
    assert "spark.sql.extensions" in pgsieve.seen
    assert ids_in(f"{s3_folder}/sales/public/items", s3_server) == [1]
    profiles("check", JAVA_HOME="/none")
    assert SECRET not in pgsieve.seen


#: The net change of each table has new rows, moved keys, and rows that start and stop to match the filter.
CHANGES = """
insert into items values (12, 'EMEA'), (13, 'APAC');
update items set region = 'APAC' where id = 1;
update items set region = 'EMEA' where id = 13;
update items set id = 100 where id = 2;
delete from items where id = 3;
insert into log values ('b'), ('b'), ('a');
delete from log where line = 'a' and ctid = (select min(ctid) from log where line = 'a');
update log set line = 'c' where line is null;
truncate plain;
insert into plain values (3, 'c')
"""


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pgsieve", ["p"], indirect=True)
def test_a_lake_on_s3_is_written_checked_repaired_and_dropped_and_shows_no_secret(
    pgsieve: Pgsieve, database: psycopg.Connection, s3_server: S3Server, s3_folder: str
) -> None:
    """It takes long: seven commands, each a process; two of them start a JVM."""
    items, log, plain = (f"{s3_folder}/sales/public/{table}" for table in ("items", "log", "plain"))

    def replicas() -> tuple[list[int], list[str | None], list[int]]:
        return ids_in(items, s3_server), column_of(log, "line", s3_server), ids_in(plain, s3_server)

    assert "no problems" in pgsieve("validate", JAVA_HOME="/none")
    pgsieve("run", JAVA_HOME="/none")
    assert replicas() == ([*range(1, 11)], ["a", "a", None], [1, 2])
    for statement in CHANGES.split(";"):
        database.execute(statement)
    # Many changes of a table without a key need Spark.
    pgsieve.configure(**{"spark.pgsieve.smallBytes": "-1"})
    pgsieve("run")
    pgsieve.configure()
    expected = ([4, 5, 6, 7, 8, 9, 10, 12, 13, 100], ["a", "a", "b", "b", "c"], [3])
    assert replicas() == expected
    DeltaTable(items, storage_options=s3_server.delta_rs).delete("id = 4")
    pgsieve("check", "--repair", ends=1)
    pgsieve("check", JAVA_HOME="/none")
    pgsieve("resync", "sales", "public.items", JAVA_HOME="/none")
    assert replicas() == expected
    commits = b"".join(objects(s3_folder, s3_server))
    pgsieve("drop", "sales", "--delete-tables", JAVA_HOME="/none")
    assert not DeltaTable.is_deltatable(items, s3_server.delta_rs)

    seen, left = pgsieve.seen.encode(), pgsieve.left
    # The secret is in none of these: the JVM's command line, Spark's event log, Dagster's records, the commits.
    assert b"org.apache.spark.deploy.SparkSubmit" in seen
    assert b"SparkListenerApplicationStart" in left
    assert b"initial_sync" in left
    assert b"userMetadata" in commits
    for place in (seen, left, commits):
        assert SECRET.encode() not in place
        assert SECRET[:12].encode() not in place
        assert SECRET[12:].encode() not in place


def objects(folder: str, server: S3Server) -> Iterator[bytes]:
    """The contents of all commits below a folder."""
    files = pafs.PyFileSystem(DeltaStorageHandler(folder, server.delta_rs))
    for entry in files.get_file_info(pafs.FileSelector("", recursive=True)):
        if entry.extension == "json":
            with files.open_input_file(entry.path) as file:
                yield file.read()


def ids_in(path: str, server: S3Server) -> list[int]:
    return column_of(path, "id", server)


def column_of(path: str, column: str, server: S3Server) -> list:
    table = DeltaTable(path, storage_options=server.delta_rs)
    query = f"select {column} from t order by {column} nulls last"
    rows = pa.table(QueryBuilder().register("t", table).execute(query).read_all())
    values: list = rows[column].to_pylist()
    return values

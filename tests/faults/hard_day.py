"""A hard day: pgsieve's processes overlap and are killed amid all kinds of trouble, and the rows must equal the oracle's.

In: a seed and the length of the day. Out: a `Report` of what happened and of findings: rows that differ, processes that ended in a
forbidden way, threads that failed. The day consists of rounds. After each round all trouble ends, one run brings everything up to
date, and the replicas are compared with built-in subscriptions.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing.process
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random

import psycopg
import pyarrow as pa
import yaml
from deltalake import DeltaTable, QueryBuilder

from pgsieve.assets.steps.records.table_states import SyncState
from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.lake.paths import escape
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults import undone
from tests.faults.alterations import Alterations
from tests.faults.busy_publisher import HEAVY, LIGHT, ROWS, TABLES, TOTAL, Worker, Writer, working
from tests.faults.disk import Disk
from tests.faults.killable import set_clock, start_pgsieve
from tests.faults.oracles import Oracle
from tests.faults.proxy import Proxy
from tests.faults.report import Report, last_error, read
from tests.faults.troubles import ROLE, Troubles
from tests.faults.undone import Undone
from tests.fixtures.oracle import wait_until

#: The subscriptions with their publications and mode. The built-in subscriptions have the same names.
SUBSCRIPTIONS = {
    "everything": (["everything"], "pipeline"),
    "chosen": (["chosen"], "publisher"),
    "undone": (["undone", "more"], "pipeline"),
}
#: It has no built-in subscription, which would stop at its row filter.
FRAGILE = {"fragile": (["fragile"], "pipeline")}
_PUBLICATIONS = {p for publications, _ in [*SUBSCRIPTIONS.values(), *FRAGILE.values()] for p in publications}
#: Encodings of the publisher's database; each of them has all letters that the writers use.
_ENCODINGS = ("UTF8", "LATIN9", "WIN1252", "EUC_JIS_2004")
DATABASE = "hard_day"
#: The subscriptions that `check` compares. The others hold rows that are in no publication any more, on purpose.
_CHECKED = ("everything", "chosen")
#: Commands of the lanes, with weights.
COMMANDS = {
    ("run",): 8.0,
    ("run", "--follow"): 4.0,
    ("run", "everything"): 1.0,
    ("run", "chosen"): 1.0,
    ("check", *_CHECKED): 0.7,
    ("check", "--repair", *_CHECKED): 0.7,
    ("resync", "everything", "public.journal"): 0.5,
    ("resync", "everything", "public.evolving"): 0.5,
    ("resync", "chosen", "public.orders", "public.readings"): 0.5,
    ("maintain",): 0.5,
    ("status", "--json"): 0.3,
}
#: Allowed exit codes: success, and a refusal that names the way out.
_ALLOWED = (0, 2)
#: What a check reports about a table that has no replica to compare now.
_WAITING = "|".join(s.meaning for s in SyncState if s not in {SyncState.READY, SyncState.SET_ASIDE})
_LANES = 4
_PATIENCE = 600
_MOST_FINDINGS = 8


class Day:
    """The publisher, the network, the lake and the oracles."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        disk: Disk | None,
        server: EmbeddedServer,
        oracles: EmbeddedServer,
        spark: Callable[[], AbstractContextManager[str]],
    ) -> None:
        """`disk` holds the lake; None if it cannot be mounted. `spark` starts a server and yields its address."""
        self.random, self.folder, self.disk, self.server = Random(seed), folder, disk, server
        self.lake = (disk.folder if disk else folder) / "lake"
        self.report = Report(seed)
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self._numbers = itertools.count(1)
        #: For how many findings the lake was kept.
        self._kept = 0
        self.proxy = Proxy(server.port)
        self.extra: dict[str, list[str]] = {}
        self._unprepared = threading.Lock()
        encoding = self.random.choice(_ENCODINGS)
        self.report.did[f"encoding {encoding}"] = 1
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"CREATE ROLE {ROLE} SUPERUSER REPLICATION LOGIN")
            locale = f"TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
            admin.execute(f"CREATE DATABASE {DATABASE} {locale}")
        self.publisher = server.conninfo(dbname=DATABASE)
        with self.connect() as connection:
            connection.execute(TABLES + undone.TABLES)
            connection.execute(ROWS + undone.PUBLICATIONS)
        tables = TABLES + undone.TABLES + undone.REST
        self.oracles = {
            name: Oracle(name, publications, oracles, self.publisher, tables, two_phase=name == "chosen")
            for name, (publications, _) in SUBSCRIPTIONS.items()
        }
        self.file = folder / "pgsieve.yaml"
        self._spark, self._start_spark = contextlib.ExitStack(), spark
        self._configure()

    def _configure(self) -> None:
        """Start Spark, and write pgsieve.yaml."""
        configuration = {
            "lake": str(self.lake),
            "spark": {"master": self._spark.enter_context(self._start_spark())},
            "sources": {
                "day": {
                    "conninfo": self.server.conninfo(dbname=DATABASE, port=str(self.proxy.port), user=ROLE)
                }
            },
            "retention": {"change_log": "1 hours", "changes": "1 hours", "versions": "7 days"},
            "subscriptions": {
                name: {
                    "source": "day",
                    "publications": publications,
                    "row_filter": mode,
                    "two_phase": name == "chosen",
                }
                for name, (publications, mode) in (SUBSCRIPTIONS | FRAGILE).items()
            },
        }
        self.file.write_text(yaml.safe_dump(configuration))

    def close(self) -> None:
        """Drop the oracles, so that their server is clean, and end Spark."""
        self._spark.close()
        for oracle in self.oracles.values():
            oracle.drop()

    def connect(self) -> psycopg.Connection:
        """A session of the publisher that no trouble disturbs."""
        return psycopg.connect(self.publisher, autocommit=True)

    # Processes.

    def start(
        self, *command: str, failpoint: str | None = None, ahead: timedelta | None = None
    ) -> tuple[multiprocessing.process.BaseProcess, Path]:
        log = self.logs / f"{next(self._numbers):05}-{'-'.join(command)[:40]}.log"
        prepare = None if ahead is None else partial(set_clock, ahead)
        return start_pgsieve(command, self.file, log, failpoint, prepare), log

    def end(self, process: multiprocessing.process.BaseProcess, log: Path, *command: str) -> int:
        """Wait for a process, count how it ended, and keep its log if it is of interest."""
        process.join(_PATIENCE)
        if process.exitcode is None:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
            process.join(5)
            process.kill()
            process.join()
            self.find(f"`{' '.join(command)}` did not end in {_PATIENCE} seconds: {log}")
        code = process.exitcode
        assert code is not None
        self.report.ended[f"{' '.join(command[:2])}: {code}"] += 1
        if code == 2:
            self.report.refusals[last_error(log)] += 1
        elif code in (0, -signal.SIGKILL, -signal.SIGTERM):
            log.unlink(missing_ok=True)
        return code

    def find(self, what: str) -> None:
        """Record a finding: something that must not happen."""
        self.report.findings.append(what)
        print(f"FOUND: {what}", flush=True)

    # Rounds.

    def live(self, seconds: float, length: float) -> None:
        """Execute rounds until the time is over."""
        self._settle()
        begun = time.monotonic()
        while time.monotonic() < begun + seconds and len(self.report.findings) < _MOST_FINDINGS:
            try:
                self._round(min(length, begun + seconds - time.monotonic()))
                self._settle()
            except AssertionError as error:  # an oracle failed, so nothing can be compared
                self.find(str(error))
                break
            finally:
                self.report.seconds = time.monotonic() - begun
            self.report.did["rounds"] += 1
            print(
                f"{self.report.seconds:6.0f} s: {self.report.kills} kills, {self.report.did['transactions']}"
                f" transactions, {self.report.did['rows compared']} rows compared,"
                f" {len(self.report.findings)} findings",
                flush=True,
            )

    def _drawn(self) -> Random:
        """A separate generator for a thread, so that its draws do not depend on other threads."""
        return Random(self.random.getrandbits(64))

    def _round(self, seconds: float) -> None:
        heavy = self.random.choice([*HEAVY, None, None, None])
        self.alterations = Alterations(
            self.publisher,
            self._drawn(),
            (1, 8),
            [*self.oracles.values()],
            self.extra,
            self._unprepared,
            filters=heavy == "filtered",
        )
        workers: list[Worker] = [
            *(
                Writer(self.publisher, self._drawn(), pause, kinds, self.extra, self._unprepared)
                for pause, kinds in (((0.0, 0.3), LIGHT), ((0.0, 0.6), LIGHT), ((2, 12), {heavy: 1.0}))
                if None not in kinds
            ),
            self.alterations,
            Undone(self.publisher, self._drawn(), (0.5, 4)),
            Troubles(self.server, self.publisher, self._drawn(), (3, 15), self.proxy, self.disk),
        ]
        done = threading.Event()
        lanes = [
            threading.Thread(target=self._lane, args=(self._drawn(), done), daemon=True)
            for _ in range(_LANES)
        ]
        with working(workers):
            for lane in lanes:
                lane.start()
            done.wait(seconds)
            if self.disk:
                self._cut_power(self.disk)
            done.set()
        for lane in lanes:
            lane.join()
        if self.disk:
            self._spark.close()
            self.disk.restore()
            self._configure()
        for worker in workers:
            self.report.did.update(worker.did)
            if worker.failure:
                self.find(worker.failure)

    def _cut_power(self, disk: Disk) -> None:
        """Cut the power. For a moment the machine's processes meet errors of the disk; then they are gone."""
        disk.cut(names=self.random.random() < 0.7)
        time.sleep(self.random.uniform(0, 1))
        self.report.did["power cuts"] += 1

    def _lane(self, random: Random, done: threading.Event) -> None:
        """Start one process after the other, and kill most of them."""
        while not done.is_set():
            command = random.choices(list(COMMANDS), list(COMMANDS.values()))[0]
            fate = random.choices(["failpoint", "killed", "ends"], [4, 6, 2])[0]
            point = (
                f"{random.choice(list(Failpoint))}:{random.choice([1, 1, 2])}"
                if fate == "failpoint"
                else None
            )
            ahead = timedelta(days=1) if random.random() < 0.15 else None
            self.report.did["clock a day ahead"] += ahead is not None
            process, log = self.start(*command, failpoint=point, ahead=ahead)
            if fate == "killed":
                self._kill_at_work(process, random.uniform(0.2, 3), done)
            elif "--follow" in command:
                done.wait(random.uniform(3, 20))
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(process.pid, signal.SIGTERM)  # type: ignore[arg-type]
            else:
                self._kill_at_work(process, math.inf, done)
            code = self.end(process, log, *command)
            if code == -signal.SIGKILL:
                self.report.did[
                    "killed at a failpoint" if fate == "failpoint" else "killed at a random moment"
                ] += 1
            elif "--follow" in command and code == -signal.SIGTERM:
                self.report.did["ended before it followed"] += 1
            elif code not in _ALLOWED and not (code == 1 and self._is_expected(log)):
                self.find(f"`{' '.join(command)}` ended with {code}: {log}\n{last_error(log)}")
            if code == 2:
                done.wait(1)  # as a person or a scheduler would, before the next start

    @staticmethod
    def _kill_at_work(
        process: multiprocessing.process.BaseProcess, seconds: float, done: threading.Event
    ) -> None:
        """Kill a process after `seconds` of processor time, which a busy machine does not outrun, or at the end of the round."""
        last = time.monotonic() + 2 + 6 * seconds  # it may wait for another process all the time
        while not done.is_set() and _worked(process.pid) < seconds and time.monotonic() < last:
            process.join(0.05)
            if process.exitcode is not None:
                return
        process.kill()

    def _is_expected(self, log: Path) -> bool:
        """Whether exit code 1 is expected: the next run copies a rewritten table, or a table left its publication and came back.

        In the second case the table is set aside: a subscriber would need a REFRESH.
        """
        text = read(log)
        waiting = len(
            re.findall(
                rf"problem: .*(?:is to be copied|the next run copies it)|: not compared, (?:{_WAITING})",
                text,
            )
        )
        if waiting and waiting == len(re.findall(r"problem: |\d +differs | not compared +[0-9A-F]+/", text)):
            return True
        aside = set(re.findall(r"public\.(\S+) is set aside", text))
        manual = {name.strip('"') for name in self.alterations.touched | self.alterations.left | {"fragile"}}
        return bool(aside) and {name.strip('"') for name in aside} <= manual

    def _settle(self) -> None:
        """Bring everything up to date, and compare it with the oracles."""
        touched: set[str] = set()
        if begun := hasattr(self, "alterations"):
            with self.connect() as connection:
                undone.restore(connection)
                self.alterations.come_back(connection)
            touched = self.alterations.touched
            self.report.did.update(self.alterations.did - self.report.did)
        for oracle in self.oracles.values():
            oracle.catch_up()
        if touched:
            self._calmly("resync", "everything", *(f"public.{table}" for table in sorted(touched)))
        if begun:
            self._calmly("resync", "fragile", "public.fragile")
        self._calmly("run")
        self._compare()

    def _calmly(self, *command: str) -> None:
        """Run a command without trouble. It must succeed at the first attempt."""
        for _ in range(3):
            process, log = self.start(*command)
            code = self.end(process, log, *command)
            if code == 0:
                return
            self.find(f"`{' '.join(command)}` ended with {code} in a calm world: {log}\n{last_error(log)}")

    # Comparison.

    def _compare(self) -> None:
        differing: set[str] = set()
        for name, oracle in self.oracles.items():
            with self.connect() as connection:
                published = connection.execute(
                    "SELECT schemaname, tablename, attnames::text[] FROM pg_publication_tables WHERE pubname = %s",
                    [name],
                ).fetchall()
            for schema, table, columns in published:
                named = ", ".join(f'"{column}"' for column in columns)
                expected_rows = oracle.execute(f'SELECT {named} FROM {schema}."{table}"')
                if self._differs(name, schema, table, named, expected_rows):
                    differing.add(f"{name} {schema}.{table}")
            self._compare_history(name)
        with self.connect() as connection:
            selected = connection.execute(undone.SELECTED).fetchall()
        if self._differs("fragile", "public", "fragile", "id, n", selected):
            differing.add("fragile public.fragile")
        self._compare_cuts()
        self._compare_server()
        if len(self.report.findings) > self._kept:
            copy = self.folder / f"finding_{len(self.report.findings)}"
            shutil.copytree(self.lake, copy)
            print(f"the lake as it was found: {copy}", flush=True)
            self._kept = len(self.report.findings)
        if differing:
            for name in {d.split()[0] for d in differing}:
                self._calmly("resync", name, *sorted({d.split()[1] for d in differing if d.startswith(name)}))

    def _differs(self, name: str, schema: str, table: str, named: str, rows_held: list[tuple]) -> bool:
        """Whether a replica differs from the oracle's rows."""
        expected_rows, replica = (
            Counter(rows_held),
            Counter(rows(self.lake / name / schema / escape(table), named)),
        )
        self.report.did["rows compared"] += expected_rows.total()
        missing, more = expected_rows - replica, replica - expected_rows
        if missing or more:
            self.find(
                f"{name}/{schema}.{table}: {missing.total()} rows missing, {more.total()} too many, such as"
                f" {_shown(missing)} and {_shown(more)}"
            )
        return bool(missing or more)

    def _compare_history(self, name: str) -> None:
        """Check that no change appears twice in a history."""
        for history in (self.lake / name / "_changes").glob("*/*"):
            if DeltaTable.is_deltatable(str(history)):
                keys = Counter(rows(history, "commit_lsn, ordinal"))
                if keys and keys.most_common(1)[0][1] > 1:
                    self.find(f"{history}: a change twice in its history: {keys.most_common(1)}")

    def _compare_cuts(self) -> None:
        """Check that no cut is in the middle of a transfer: the newest cuts, and a sample of the others."""
        cuts = rows(self.lake / "everything" / "_cuts", "tables")
        accounts = [f'"public"."{table}"' for table in ("checking", "savings")]
        for (cut,) in cuts[:2] + self.random.sample(cuts, min(6, len(cuts))):
            versions = dict(cut)
            if not set(accounts) <= set(versions):
                continue
            total = sum(
                amount
                for account, table in zip(accounts, ("checking", "savings"), strict=True)
                for (amount,) in rows(
                    self.lake / "everything" / "public" / table, "amount", versions[account]
                )
            )
            self.report.did["cuts read"] += 1
            if total != TOTAL:
                self.find(f"a cut in the middle of a transfer: {total} at {versions}")

    def _compare_server(self) -> None:
        """Check that nothing was left behind on the server."""
        with self.connect() as connection:

            def slots() -> list[str]:
                fetched = connection.execute(
                    "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'pg%'"
                )
                return sorted(name for (name,) in fetched if not name.startswith("pg_"))

            expected = ["pgsieve_day", "pgsieve_day_chosen"]
            try:
                wait_until(lambda: slots() == expected, lambda: f"slots {slots()}", 60)
            except AssertionError as error:
                self.find(str(error))
            publications = {n for (n,) in connection.execute("SELECT pubname FROM pg_publication").fetchall()}
            if unexpected := {p for p in publications - _PUBLICATIONS if not p.startswith("pgsieve_day")}:
                self.find(f"publications {unexpected}")


def rows(path: Path, columns: str, version: int | None = None) -> list[tuple]:
    """The rows of a Delta table, now or at a version, read by another reader than the writer's."""
    query = QueryBuilder().register("t", DeltaTable(str(path), version=version))
    fetched = pa.table(query.execute(f"SELECT {columns} FROM t").read_all())
    return list(zip(*(column.to_pylist() for column in fetched.columns), strict=True))


def _worked(pid: int | None) -> float:
    """The processor time of a process, in seconds."""
    try:
        # The name in parentheses comes first; utime and stime are the fields 14 and 15 (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _shown(fetched: Counter[tuple]) -> str:
    return "; ".join(str(tuple(str(value)[:60] for value in row)) for row in list(fetched)[:5])


@contextlib.contextmanager
def lived(day: Day) -> Iterator[Day]:
    """The day, which is closed with the block."""
    with day.proxy, contextlib.closing(day):
        yield day

"""Records what servers send for the scenarios of this folder: `python -m tests.recordings.record [scenario ...]`.

In: `<scenario>.sql`. Its first lines say what it shows, how it is read (`-- read`), with which settings of the reading session
(`-- set`), and from which version on (`-- since`). Statements before `-- record` prepare the database. Each later statement runs once the
one before is done and, for a walsender, was sent. `b: ` before a statement names one of several sessions.

Out: `<version>/<scenario>.txt`, in the format of `tests/fixtures/recordings.py`, for every version that can be embedded. LSNs,
transaction ids, OIDs and times differ each time.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.protocol.envelope import PrimaryKeepalive, decode_envelope
from pgsieve.resources.postgres.embedded import POSTGRES_VERSIONS, EmbeddedServer
from tests.fixtures.recordings import FOLDER, WALSENDER, Reading, Writer
from tests.fixtures.servers import new_server
from tests.fixtures.walsender import Walsender

SLOT = "recording"


@dataclass(frozen=True)
class Scenario:
    """The SQL of a scenario, and the settings in its first lines."""

    readings: tuple[Reading, ...]
    settings: str
    since: int
    before: tuple[str, ...]
    statements: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Scenario:
        header, before, statements = re.split(r"\n\n(?:-- record\n)?", text, maxsplit=2)
        directives = [line.removeprefix("-- ").partition(" ") for line in header.splitlines()]
        return cls(
            readings=tuple(Reading.parse(rest) for word, _, rest in directives if word == "read"),
            settings=" ".join(f"-c {rest}" for word, _, rest in directives if word == "set"),
            since=max([int(rest) for word, _, rest in directives if word == "since"], default=0),
            before=_statements(before),
            statements=_statements(statements),
        )


def _statements(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\S.*?;$", text, flags=re.DOTALL | re.MULTILINE))


class Publisher:
    """A new database of a server, with a slot and the sessions that a scenario names."""

    def __init__(self, server: EmbeddedServer, stack: ExitStack) -> None:
        self._server, self._stack = server, stack
        self._sessions: dict[str, psycopg.Connection] = {}
        self._control = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))
        self._control.execute("CREATE DATABASE recorded")
        self._control.execute("CREATE TABLE flushed ()")
        stack.callback(self._drop)

    def _drop(self) -> None:
        # A walsender may outlive its connection for a moment.
        slot = f"FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
        self._control.execute(f"SELECT pg_terminate_backend(active_pid, 10000) {slot}")
        self._control.execute(f"SELECT pg_drop_replication_slot(slot_name) {slot}")
        self._control.execute("DROP TABLE flushed")
        self._control.execute("DROP DATABASE recorded WITH (FORCE)")

    def conninfo(self, **extra: str) -> str:
        return self._server.conninfo(dbname="recorded", client_encoding="UTF8", **extra)

    def session(self, name: str = "", **extra: str) -> psycopg.Connection:
        if name not in self._sessions:
            connection = psycopg.connect(self.conninfo(**extra), autocommit=True)
            self._sessions[name] = self._stack.enter_context(connection)
        return self._sessions[name]

    def run(self, statement: str) -> None:
        named = re.fullmatch(r"(?:([a-z]): )?(.*)", statement, flags=re.DOTALL)
        assert named is not None
        self.session(named[1] or "a").execute(named[2])

    def flushed(self) -> int:
        """Flush all WAL, also that of open transactions, by a commit in another database."""
        self._control.execute("INSERT INTO flushed DEFAULT VALUES")
        return parse_lsn(self._control.execute("SELECT pg_current_wal_flush_lsn()").fetchone()[0])


def record(server: EmbeddedServer, scenario: Scenario, reading: Reading) -> list[str]:
    """Run a scenario once and return the lines of its recording."""
    writer = Writer(reading)
    options = dict(reading.options)
    with ExitStack() as stack:
        publisher = Publisher(server, stack)
        for statement in scenario.before:
            publisher.run(statement)
        session = publisher.session()
        session.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)",
            [SLOT, options.pop("two_phase", "") == "true"],
        )
        names = session.execute("SELECT string_agg(quote_ident(pubname), ',') FROM pg_publication").fetchone()
        options["publication_names"] = names[0]
        if reading.transport == WALSENDER:
            _record_walsender(publisher, scenario, options, writer)
        else:
            _record_sql(publisher, scenario, options, writer)
    return writer.lines


def _record_sql(publisher: Publisher, scenario: Scenario, options: dict[str, str], writer: Writer) -> None:
    for statement in scenario.statements:
        publisher.run(statement)
        writer.statement(statement)
    flat = [text for option in options.items() for text in option]
    query = sql.SQL("SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, {})")
    marks = sql.SQL(", ").join([sql.Placeholder()] * len(flat))
    reader = publisher.session("reader", options=scenario.settings)
    for (data,) in reader.execute(query.format(marks), [SLOT, *flat]):
        writer.sent(data)


def _record_walsender(
    publisher: Publisher, scenario: Scenario, options: dict[str, str], writer: Writer
) -> None:
    conninfo = publisher.conninfo(replication="database", options=scenario.settings)
    with Walsender(conninfo, SLOT, options) as walsender:
        answer = b""
        for statement in scenario.statements:
            publisher.run(statement)
            writer.statement(statement)
            *sent, answer = _until_sent(walsender, publisher)
            for data in sent:
                writer.sent(data)
        writer.sent(answer)


def _until_sent(walsender: Walsender, publisher: Publisher) -> list[bytes]:
    """Receive everything that was written up to now: the messages, and the keepalive that says that there are no more."""
    target = publisher.flushed()
    received = []
    while True:
        try:
            data = walsender.receive(0.02)
        except TimeoutError:
            walsender.report(0)
            continue
        envelope = decode_envelope(data)
        if not isinstance(envelope, PrimaryKeepalive):
            received.append(data)
        elif envelope.wal_end >= target:
            return [*received, data]


def main(names: list[str]) -> None:
    """Record the named scenarios, or all."""
    files = [FOLDER / f"{name}.sql" for name in names] or sorted(FOLDER.glob("*.sql"))
    for version in sorted(POSTGRES_VERSIONS):
        with new_server(version, {"fsync": "off"}) as server:
            (FOLDER / str(version)).mkdir(exist_ok=True)
            for file in files:
                scenario = Scenario.parse(file.read_text(encoding="utf-8"))
                if scenario.since > version:
                    continue
                sections = ["\n".join(record(server, scenario, reading)) for reading in scenario.readings]
                target = FOLDER / str(version) / f"{file.stem}.txt"
                target.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
                print(
                    f"{version} {file.stem}: {len(scenario.readings)} readings, {target.stat().st_size} bytes"
                )


if __name__ == "__main__":
    main(sys.argv[1:])

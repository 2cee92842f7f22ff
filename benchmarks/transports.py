"""Measures the messages per second from a slot by two transports: peeks through SQL, and streaming replication.

    python benchmarks/transports.py [--rows 500000] [--runs 3]

The workload is transactions of 100 inserts of about 20 bytes that wait in the slot. Connections go over the
server's Unix socket, and over TCP on this machine. Both transports read all transactions in each run, and
confirm nothing. Prints the messages per second by wall time, the processor time of the receiving side per
message, and the ratio to the peek over the same connection.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query, read_messages
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import ReceivedMessages
from pgsieve.resources.postgres.slot import create_slot
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.stream import ReplicationStream
from pgsieve.resources.postgres.wal import read_current_lsn

SETTINGS = {"fsync": "off", "autovacuum": "off", "max_wal_size": "8GB", "shared_buffers": "256MB"}
SLOT, PUBLICATION = "transports", "transports"
PER_TRANSACTION = 100


def peek(source: Source, _start: int, end: int) -> Iterator[pa.RecordBatch]:
    """All messages of the slot, through SQL."""
    version = source.check_ready()
    yield from read_messages(
        source.make_executor_conninfo(), peek_query(SLOT, end, PgoutputOptions((PUBLICATION,)), version)
    )


def stream(source: Source, start: int, end: int) -> Iterator[pa.RecordBatch]:
    """All messages of the slot, by streaming replication."""
    with ReplicationStream(
        source, SLOT, PgoutputOptions((PUBLICATION,)), start, log_message=print
    ) as replication:
        for item in replication.items():
            if isinstance(item, ReceivedMessages):
                yield item.messages
                if item.position_lsn >= end:
                    return


def measure(
    read: Callable[[Source, int, int], Iterator[pa.RecordBatch]], source: Source, start: int, end: int
) -> tuple[float, float, int]:
    """Wall seconds, this process's processor seconds, and messages of one reading."""
    started, processor, messages = time.perf_counter(), time.process_time(), 0
    for batch in read(source, start, end):
        messages += batch.num_rows
    return time.perf_counter() - started, time.process_time() - processor, messages


def main() -> None:
    """Fill a slot and read it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer(Path(folder) / "data", settings=SETTINGS) as server,
    ):
        tcp, local = (
            Source("tcp", server.conninfo()),
            Source("unix", server.conninfo(host=str(server.data_path))),
        )
        with tcp.connect() as connection:
            connection.execute("create table public.t (a bigint primary key, b text)")
            connection.execute(f"create publication {PUBLICATION} for table public.t")
            start = create_slot(connection, "tcp", SLOT)
            connection.execute(
                f"do $$ begin for n in 0..{options.rows // PER_TRANSACTION - 1} loop insert into public.t select"
                f" n * {PER_TRANSACTION} + i, 'some text' from generate_series(1, {PER_TRANSACTION}) i;"
                " commit; end loop; end $$".encode()
            )
            # After this commit beyond `end`, no transport waits for an idle server.
            end = read_current_lsn(connection)
            connection.execute("insert into public.t values (0, 'last')")
        print(f"{'':24}{'messages/s':>14}{'cpu us/message':>16}{'ratio':>8}   slot from {format_lsn(start)}")
        for source in (local, tcp):
            best: dict[str, float] = {}
            for _ in range(options.runs):
                for read in (peek, stream):
                    seconds, processor, messages = measure(read, source, start, end)
                    rate = messages / seconds
                    best[read.__name__] = max(rate, best.get(read.__name__, 0))
                    print(
                        f"{source.name + ', ' + read.__name__:24}{rate:14,.0f}{processor / messages * 1e6:16.2f}"
                    )
            print(
                f"{source.name + ', best':24}{best['stream']:14,.0f}{'':16}{best['stream'] / best['peek']:8.2f}"
            )


if __name__ == "__main__":
    main()

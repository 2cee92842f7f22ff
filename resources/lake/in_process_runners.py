"""Runs functions on parts of data in this process: by the calling thread, or by threads.

In: the number of parts, and a function (`Part`). See `pgsieve.resources.lake.runners`.
Out: the rows of all parts.

Raises the errors of the function.

The calling thread does small work. With `threads[N]` in the configuration, threads of this process do the work that is
too much for it, for example on a machine without Java. The PostgreSQL driver, Arrow and the Parquet writer run without
Python's global lock, so the threads use several cores.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from functools import cache, partial
from threading import Event

import pyarrow as pa

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.runners import OnProgress, Runner, record_costs
from pgsieve.resources.parts import MESSAGE_SCHEMA, Guard, Item, Message, Part, Receivers, group_by_receiver
from pgsieve.resources.work import DRIVER


def _exchange_in_memory(
    runner: "Runner", part: Part, part_count: int, receivers: Sequence[Receivers], schema: pa.Schema
) -> pa.Table:
    """The method `exchange` of a runner that keeps the messages in memory. See `Runner`."""
    rows = runner.run(part, part_count, schema=MESSAGE_SCHEMA)
    for stage, stage_receivers in enumerate(receivers, 1):
        messages_by_receiver = defaultdict[int, list[Message]](list)
        for receiver_number, messages in group_by_receiver(rows.to_batches()):
            messages_by_receiver[receiver_number] += messages
        stage_schema = schema if stage == len(receivers) else MESSAGE_SCHEMA
        rows = runner.run(
            partial(_receive, stage_receivers, list(messages_by_receiver.items())),
            len(messages_by_receiver),
            schema=stage_schema,
        )
    return rows


def _receive(
    receivers: Receivers,
    messages_by_receiver: Sequence[tuple[int, Sequence[Message]]],
    part_number: int,
    guard: Guard,
) -> Iterable[pa.RecordBatch]:
    """Run one receiver, as a part of a runner. `part_number` is an index into `messages_by_receiver`."""
    return receivers.receive(*messages_by_receiver[part_number], guard)


class ThreadRunner:
    """The runner that uses `parallelism` threads of this process. All callers share these threads."""

    max_callers = 1

    def __init__(self, thread_count: int) -> None:
        self.parallelism = thread_count
        self._end_events: set[Event] = set()

    def run(
        self,
        part: Part,
        part_count: int,
        on_progress: OnProgress | None = None,
        schema: pa.Schema = FILE_SCHEMA,
    ) -> pa.Table:
        """Run all parts, as `Runner` describes. If a part fails, the other parts end at their next batch."""
        end_event = Event()

        def yield_until_end(items: Iterable[Item]) -> Iterator[Item]:
            for item in items:
                if end_event.is_set():
                    raise CancelledError
                yield item

        def run_part(number: int) -> list[pa.RecordBatch]:
            return list(part(number, yield_until_end))

        self._end_events.add(end_event)
        futures = [
            _get_thread_pool(self.parallelism).submit(run_part, number) for number in range(part_count)
        ]
        rows: list[pa.RecordBatch] = []
        try:
            for count, future in enumerate(as_completed(futures), 1):
                rows += future.result()
                if on_progress is not None:
                    on_progress(count)
        finally:
            end_event.set()
            # Once this function has returned, no thread may still be writing a file or reading a snapshot.
            wait([future for future in futures if not future.cancel()])
            self._end_events.discard(end_event)
        return record_costs("threads", part_count, pa.Table.from_batches(rows, schema))

    exchange = _exchange_in_memory

    def prepare(self) -> None:
        """Does nothing, because threads need no preparation."""

    def stop(self, *, cancels_jobs: bool) -> None:
        """Make all parts that are running end at their next batch."""
        del cancels_jobs
        for end_event in tuple(self._end_events):
            end_event.set()


class _CallingThreadRunner:
    """The runner that uses the calling thread. It is for small work, and runs one part after the other."""

    max_callers = parallelism = 1

    def run(
        self,
        part: Part,
        part_count: int,
        on_progress: OnProgress | None = None,
        schema: pa.Schema = FILE_SCHEMA,
    ) -> pa.Table:
        """Run all parts, as `Runner` describes."""
        rows: list[pa.RecordBatch] = []
        for number in range(part_count):
            rows += part(number, iter)
            if on_progress is not None:
                on_progress(number + 1)
        results = pa.Table.from_batches(rows, schema)
        # Small results that describe no files, for example counts, cost nothing worth telling.
        return record_costs(DRIVER, part_count, results) if schema.equals(FILE_SCHEMA) else results

    exchange = _exchange_in_memory

    def prepare(self) -> None:
        """Does nothing, because the thread needs no preparation."""

    def stop(self, *, cancels_jobs: bool) -> None:
        """Does nothing, because small work ends soon by itself."""


#: The runner for small work.
CALLING_THREAD: Runner = _CallingThreadRunner()


@cache
def _get_thread_pool(thread_count: int) -> ThreadPoolExecutor:
    """The pool with this number of threads. All callers share it."""
    return ThreadPoolExecutor(thread_count, "pgsieve-executor")

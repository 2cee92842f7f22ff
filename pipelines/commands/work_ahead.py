"""The work of several steps, done by a thread while Dagster records the steps before.

```
thread      work 1 │ work 2 │ work 3 │
Dagster            │ step 1  │ step 2  │ step 3
```

One work at a time, in their order: a Spark session's settings say whose writes they are. Dagster's records of a step, and its checks,
take as long as a small work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.assets.work import Done, Work, timed
from pgsieve.resources.lake.lake import Lake

T = TypeVar("T")


@contextmanager
def done_ahead(works: Sequence[tuple[Lake, Callable[[Log], T]]]) -> Iterator[list[Work[T]]]:
    """The works, each with the lake that it writes, of which each is begun before it is asked for; one alone only then.

    Whoever leaves the block early waits for the one that is being done, which ends soon; no other is begun.
    """
    if len(works) < 2:
        yield [partial(_now, work) for _, work in works]
        return

    def one(lake: Lake, work: Callable[[Log], T], lines: list[str]) -> Done[T]:
        try:
            return timed(lambda: work(lines.append))
        finally:
            lake.lend_tables()

    with ThreadPoolExecutor(1, "pgsieve-ahead") as worker:
        works[0][0].lend_tables()
        logs: list[list[str]] = [[] for _ in works]
        # A context can be entered by one at a time.
        begun = [
            worker.submit(copy_context().run, one, lake, work, lines)
            for (lake, work), lines in zip(works, logs, strict=True)
        ]

        def asked(number: int, log: Log) -> Done[T]:
            works[number][0].lend_tables()  # What this thread has looked at for the steps before.
            wait([begun[number]])
            for line in logs[number]:
                log(line)
            return begun[number].result()

        try:
            yield [partial(asked, number) for number in range(len(works))]
        except BaseException:
            for lake, _ in works:
                lake.executors.stop()
            raise
        finally:
            worker.shutdown(wait=False, cancel_futures=True)


def _now(work: Callable[[Log], T], log: Log) -> Done[T]:
    return timed(lambda: work(log))

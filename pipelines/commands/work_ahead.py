"""The work of several steps, done by a thread while Dagster records the steps before.

```
thread      work 1 │ work 2 │ work 3 │
Dagster            │ step 1  │ step 2  │ step 3
```

One work at a time, in their order: a Spark session's settings say whose writes they are. Dagster's records of a step, and its checks,
take as long as a small work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.assets.work import Done, Work, timed
from pgsieve.resources.lake.lake import Lake

T = TypeVar("T")


@contextmanager
def done_ahead(lake: Lake, works: Sequence[Callable[[Log], T]]) -> Iterator[list[Work[T]]]:
    """The same works, of which each is begun before it is asked for; one alone is done when it is asked for.

    Who leaves the block before all are done waits for the one that is being done, which ends soon; no other is begun.
    """
    if len(works) < 2:
        yield [partial(_now, work) for work in works]
        return

    def one(work: Callable[[Log], T]) -> tuple[Done[T], list[str]]:
        lines: list[str] = []
        try:
            return timed(lambda: work(lines.append)), lines
        finally:
            lake.lend_tables()

    with ThreadPoolExecutor(1, "pgsieve-ahead") as worker:
        lake.lend_tables()
        # A context can be entered by one at a time.
        begun = [worker.submit(copy_context().run, one, work) for work in works]

        def asked(number: int, log: Log) -> Done[T]:
            lake.lend_tables()  # The step before is told of.
            done, lines = begun[number].result()
            for line in lines:
                log(line)
            return done

        try:
            yield [partial(asked, number) for number in range(len(works))]
        except BaseException:
            lake.executors.stop()
            raise
        finally:
            worker.shutdown(wait=False, cancel_futures=True)


def _now(work: Callable[[Log], T], log: Log) -> Done[T]:
    return timed(lambda: work(log))

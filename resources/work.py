"""Names Spark's jobs in Spark's UI, and measures what a step of a run costs: engines, tasks, bytes and seconds.

In: - the code of a step, as `with` blocks
    - reports of the engines that did the work of the step (an engine executes tasks, for example Spark or threads)
Out: - Spark jobs with a group and a description
     - the costs, as a `Work`

Each thread has its own names and costs (context variables), unless it runs in a copy of another thread's context.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

from pyspark.sql import SparkSession

from pgsieve.decoding.wording import quantity
from pgsieve.resources.context import assign_within

#: The name of the engine that does small work: the calling thread.
DRIVER = "driver"
_COSTS_LOCK = Lock()


@dataclass
class Work:
    """The costs of some work: the engines that ran it, its number of tasks, the bytes that were written, and the seconds."""

    engines: set[str] = field(default_factory=set)
    task_count: int = 0
    written_bytes: int = 0
    seconds: float = 0.0

    @property
    def engine_text(self) -> str:
        """The names of the engines. If no engine has run anything, the name of the driver."""
        return " + ".join(sorted(self.engines)) or DRIVER

    def add(self, other: "Work") -> None:
        """Add the costs of other work."""
        with _COSTS_LOCK:
            self.engines |= other.engines
            self.task_count += other.task_count
            self.written_bytes += other.written_bytes
            self.seconds += other.seconds


_MEASURED_WORK: ContextVar[tuple[Work, ...]] = ContextVar("measured", default=())
#: The name of a job: its owner, which is usually a subscription, and its action.
JobName = tuple[str, str]
_JOB_NAME: ContextVar[JobName | None] = ContextVar("job", default=None)
#: The name of a joint job, which works for several subscriptions, lists up to this many of them. For more it has
#: only their number.
_MAX_LISTED_SUBSCRIPTIONS = 3


@contextmanager
def measure_work() -> Iterator[Work]:
    """Measure the costs of the block. They include the costs that `add_costs` reports within the block."""
    work, start_time = Work(), monotonic()
    try:
        with assign_within(_MEASURED_WORK, (*_MEASURED_WORK.get(), work)):
            yield work
    finally:
        work.seconds = monotonic() - start_time


def add_costs(engine: str, task_count: int, written_bytes: int) -> None:
    """Add a number of tasks of an engine, and the bytes that they wrote, to the costs of all enclosing `measure_work` blocks."""
    for work in _MEASURED_WORK.get():
        work.add(Work({engine}, task_count, written_bytes))


@contextmanager
def name_jobs(owner: str, action: str) -> Iterator[None]:
    """Give the Spark jobs of the block the name `owner: action` in Spark's UI.

    The UI shows the jobs of an owner as a group.
    """
    with assign_within(_JOB_NAME, (owner, action)):
        yield


def get_job_name() -> JobName | None:
    """The name for the next jobs of this thread; None if the thread is not within `name_jobs`."""
    return _JOB_NAME.get()


def join_job_names(names: Collection[JobName]) -> JobName:
    """The name of one job that does the work of several jobs with these names."""
    owners, actions = (list(dict.fromkeys(texts)) for texts in zip(*names, strict=True))
    rest_text = f", and {len(actions) - 1} more" if len(actions) > 1 else ""
    owner = (
        ", ".join(owners)
        if len(owners) <= _MAX_LISTED_SUBSCRIPTIONS
        else quantity(len(owners), "subscription")
    )
    return owner, actions[0] + rest_text


def with_job_name(session: SparkSession) -> SparkSession:
    """Give the next jobs of this thread the name of the enclosing `name_jobs`. Return the session.

    Spark Connect has no descriptions of jobs, so the name becomes a tag of the jobs. A tag must not contain a
    comma.
    """
    if (name := _JOB_NAME.get()) is None:
        return session
    owner, text = name[0], ": ".join(name)
    if isinstance(session, SparkSession):
        session.sparkContext.setJobGroup(owner, text)
        return session
    connect: Any = session
    connect.clearTags()
    connect.addTag(text.replace(",", ";"))
    return session


def cancel_jobs(session: SparkSession) -> None:
    """Cancel all jobs of a session that are running. Of a Spark Connect server, other sessions' jobs go on."""
    if isinstance(session, SparkSession):
        session.sparkContext.cancelAllJobs()
        return
    connect: Any = session
    connect.interruptAll()


def name_engine(session: Any) -> str:
    """The name of the engine of a session. It has no address, because an address may contain a secret."""
    if not isinstance(session, SparkSession):
        return "Spark Connect"
    master = session.conf.get("spark.master", "") or ""
    return "Spark, local" if master.startswith("local") else "Spark, cluster"

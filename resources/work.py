"""Names a step's jobs in Spark's UI, and measures its costs: engines, tasks, bytes and seconds.

In: blocks of the steps, and the engines that ran their parts. Out: Spark jobs with a group and a description,
and a `Work`. Both belong to a thread's context, and to other threads with a copy of that context.
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

#: The engine of small work: the calling thread.
DRIVER = "driver"
_COSTS_LOCK = Lock()


@dataclass
class Work:
    """The costs of some work: the engines that ran it, the number of tasks, the written bytes, and the seconds."""

    engines: set[str] = field(default_factory=set)
    tasks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def engine(self) -> str:
        """The names of the engines; the driver if no engine was needed."""
        return " + ".join(sorted(self.engines)) or DRIVER

    def add(self, other: "Work") -> None:
        """Add the costs of other work."""
        with _COSTS_LOCK:
            self.engines |= other.engines
            self.tasks += other.tasks
            self.bytes += other.bytes
            self.seconds += other.seconds


_MEASURED: ContextVar[tuple[Work, ...]] = ContextVar("measured", default=())
#: The name of a job: its owner, usually a subscription, and its action.
Name = tuple[str, str]
_JOB_NAME: ContextVar[Name | None] = ContextVar("job", default=None)
#: The name of a joint job lists up to this many subscriptions, or else their number.
_MAX_LISTED_SUBSCRIPTIONS = 3


@contextmanager
def measure() -> Iterator[Work]:
    """Measure the costs of the block, including the costs that `add_costs` reports."""
    work, began = Work(), monotonic()
    try:
        with assign_within(_MEASURED, (*_MEASURED.get(), work)):
            yield work
    finally:
        work.seconds = monotonic() - began


def add_costs(engine: str, tasks: int, size: int) -> None:
    """Add tasks of an engine, and the bytes that they wrote, to the work of all enclosing `measure` blocks."""
    for work in _MEASURED.get():
        work.add(Work({engine}, tasks, size))


@contextmanager
def name_jobs(owner: str, action: str) -> Iterator[None]:
    """Name the Spark jobs of the block `owner: action` in Spark's UI, which groups the jobs of an owner."""
    with assign_within(_JOB_NAME, (owner, action)):
        yield


def current_job_name() -> Name | None:
    """The name for the next jobs of this thread; None outside of `name_jobs`."""
    return _JOB_NAME.get()


def joint_job_name(names: Collection[Name]) -> Name:
    """The name of one job that does the work of several jobs."""
    owners, actions = (list(dict.fromkeys(each)) for each in zip(*names, strict=True))
    rest_text = f", and {len(actions) - 1} more" if len(actions) > 1 else ""
    owner = (
        ", ".join(owners)
        if len(owners) <= _MAX_LISTED_SUBSCRIPTIONS
        else quantity(len(owners), "subscription")
    )
    return owner, actions[0] + rest_text


def with_job_name(session: SparkSession) -> SparkSession:
    """Give the next jobs of this thread the name of the enclosing `name_jobs`; return the session.

    Spark Connect has no job descriptions. There the name becomes a tag, which must not contain a comma.
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


def engine_of(session: Any) -> str:
    """The name of a session's engine, without its address, which may contain a secret."""
    if not isinstance(session, SparkSession):
        return "Spark Connect"
    master = session.conf.get("spark.master", "") or ""
    return "Spark, local" if master.startswith("local") else "Spark, cluster"

"""The names of a step's work in Spark's UI, and its costs: engine, tasks, bytes and seconds.

In: blocks of the steps, and the engines that ran their parts. Out: Spark jobs with a group and a description,
and a `Work`. Both belong to a thread's context; code that goes on in another thread runs in a copy of that
context.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

from pyspark.sql import SparkSession

from pgsieve.decoding.wording import counted
from pgsieve.resources.context import assigned

#: The engine of small work: the calling thread.
DRIVER = "driver"
_NOTED = Lock()


@dataclass
class Work:
    """The costs of some work: the `engines` that ran it, the `tasks` that they ran, and the `bytes` that these wrote."""

    engines: set[str] = field(default_factory=set)
    tasks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def engine(self) -> str:
        """The engines that ran the work; the driver if no engine was needed."""
        return " + ".join(sorted(self.engines)) or DRIVER

    def add(self, other: "Work") -> None:
        """Add the costs of other work."""
        with _NOTED:
            self.engines |= other.engines
            self.tasks += other.tasks
            self.bytes += other.bytes
            self.seconds += other.seconds


_MEASURED: ContextVar[tuple[Work, ...]] = ContextVar("measured", default=())
#: A job's name: the subscription that it works for, and what it does.
Name = tuple[str, str]
_CALLED: ContextVar[Name | None] = ContextVar("called", default=None)
#: A job's name lists up to this many subscriptions, and counts them if they are more.
_NAMED = 3


@contextmanager
def measured() -> Iterator[Work]:
    """Measure the costs of the work within the block."""
    work, began = Work(), monotonic()
    try:
        with assigned(_MEASURED, (*_MEASURED.get(), work)):
            yield work
    finally:
        work.seconds = monotonic() - began


def note(engine: str, tasks: int, size: int) -> None:
    """Add tasks of an engine, and the bytes that they wrote, to the work that is measured."""
    for work in _MEASURED.get():
        work.add(Work({engine}, tasks, size))


@contextmanager
def called(owner: str, what: str) -> Iterator[None]:
    """Have Spark's UI name the jobs of the block `owner: what`, and group the jobs of an owner."""
    with assigned(_CALLED, (owner, what)):
        yield


def called_here() -> Name | None:
    """The name of the next jobs of this thread."""
    return _CALLED.get()


def common_name(names: Collection[Name]) -> Name:
    """The name of one job that does the work of several."""
    owners, actions = (list(dict.fromkeys(each)) for each in zip(*names, strict=True))
    more = f", and {len(actions) - 1} more" if len(actions) > 1 else ""
    owner = ", ".join(owners) if len(owners) <= _NAMED else counted(len(owners), "subscription")
    return owner, actions[0] + more


def named_here(session: SparkSession) -> SparkSession:
    """The session; the next jobs of this thread get the name of the block of `called`.

    Spark Connect has no job descriptions. There the name becomes a tag, which may contain no comma.
    """
    if (name := _CALLED.get()) is None:
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

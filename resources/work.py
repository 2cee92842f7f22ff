"""What a step's work is called in Spark's UI, and what it took: who ran it, how many tasks and bytes, how long.

In: blocks of the steps, and what ran their parts. Out: jobs of Spark with a group and a description, and a `Work`. Both
belong to a thread's context; who goes on in other threads takes a copy of it there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import Any

from pyspark.sql import SparkSession

#: The thread that asked, for what is few.
DRIVER = "driver"
_NOTED = Lock()


@dataclass
class Work:
    """What some work took; `engines` are those that ran it, `tasks` the parts that they were given, `bytes` what these wrote."""

    engines: set[str] = field(default_factory=set)
    tasks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def engine(self) -> str:
        """Who ran it; nobody had to where the driver found nothing to do."""
        return " + ".join(sorted(self.engines)) or DRIVER

    def add(self, other: "Work") -> None:
        """Count other work as well."""
        with _NOTED:
            self.engines |= other.engines
            self.tasks += other.tasks
            self.bytes += other.bytes
            self.seconds += other.seconds


_MEASURED: ContextVar[tuple[Work, ...]] = ContextVar("measured", default=())
_CALLED: ContextVar[tuple[str, str] | None] = ContextVar("called", default=None)


@contextmanager
def measured() -> Iterator[Work]:
    """What the work within the block takes."""
    work, began = Work(), monotonic()
    token = _MEASURED.set((*_MEASURED.get(), work))
    try:
        yield work
    finally:
        _MEASURED.reset(token)
        work.seconds = monotonic() - began


def note(engine: str, tasks: int, size: int) -> None:
    """Count so many tasks of an engine, which wrote so many bytes, to the work that is measured."""
    for work in _MEASURED.get():
        work.add(Work({engine}, tasks, size))


@contextmanager
def called(owner: str, what: str) -> Iterator[None]:
    """Have Spark's UI call the jobs of the block `owner: what`, and group those of an owner."""
    token = _CALLED.set((owner, f"{owner}: {what}"))
    try:
        yield
    finally:
        _CALLED.reset(token)


def named_here(session: SparkSession) -> SparkSession:
    """The session, whose next jobs of this thread are called as the block says.

    Spark Connect knows no description: there a tag says the same, in which no comma may be.
    """
    if (name := _CALLED.get()) is None:
        return session
    owner, text = name
    if isinstance(session, SparkSession):
        session.sparkContext.setJobGroup(owner, text)
        return session
    connect: Any = session
    connect.clearTags()
    connect.addTag(text.replace(",", ";"))
    return session


def engine_of(session: Any) -> str:
    """What a session's work is told as: never its address, which may have a secret."""
    if not isinstance(session, SparkSession):
        return "Spark Connect"
    master = session.conf.get("spark.master", "") or ""
    return "Spark, local" if master.startswith("local") else "Spark, cluster"

"""The protocol of positions, versions and states, checked exhaustively in a model of processes without locks.

Each durable step of a drain, a transformation, an apply and a copy is one step here. Between any two steps another process may work,
the publisher may write, and a process may die. The model has no locks, because a lost lock is no lock. A position p means everything
up to transaction p. Two things must always hold. If a table is ready, its replica has each transaction up to its position exactly once,
and no other. And after a further run the replica is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import pytest

pytestmark = pytest.mark.slow

RUN = ("copy if needed", "drain", "transform", "transform", "apply")
RESYNC = ("copy", "drain", "transform", "apply")
#: Reads the slot past transactions that the server cannot send.
PASS = ("pass", "drain")
PROGRAMS = [*combinations_with_replacement((RUN, RESYNC), 2), (RUN, PASS), (RESYNC, PASS)]
WRITES, DEATHS = 3, 1


@dataclass(frozen=True, slots=True)
class Protocol:
    """The comparisons that steps make before they commit. pgsieve makes all of them."""

    change_log: bool = True
    records: bool = True
    replica: bool = True
    fence: bool = True
    amid_slices: bool = True
    cuts: bool = True
    states: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """A Delta table: its version, its position, and its rows."""

    version: int = 0
    position: int = 0
    rows: tuple = ()

    def with_rows(self, rows: tuple, position: int) -> Table:
        return Table(self.version + 1, position, rows)


@dataclass(frozen=True, slots=True)
class Process:
    """The remaining steps of a process, its place in the first of them, and what it remembers."""

    todo: tuple[str, ...]
    step: int = 0
    memory: tuple = ()

    def then(self, *memory: object) -> Process:
        return Process(self.todo, self.step + 1, memory)

    @property
    def done(self) -> Process:
        return Process(self.todo[1:])


@dataclass(frozen=True, slots=True)
class World:
    """Everything durable, and the processes."""

    processes: tuple[Process, ...]
    written: int = 1
    slot: int = 0
    deaths: int = 0
    #: (begin, end) of each slice.
    change_log: Table = Table()
    #: (end, begin, copied at) of each slice that was transformed for the table.
    changes: Table = Table()
    #: (end, whether the table was in it) of each slice.
    transformed: Table = Table()
    #: (state, LSN of the copy).
    states: Table = Table(rows=("ready", 0))
    #: Slices up to here are applied to every ready table.
    cut: int = 0
    #: How often each transaction was applied.
    replica: Table = Table(rows=(0,) * WRITES)

    def by(self, number: int, process: Process, **durable: object) -> World:
        processes = (*self.processes[:number], process, *self.processes[number + 1 :])
        return replace(self, processes=processes, **durable)

    def is_right(self) -> bool:
        up_to = self.replica.position
        exact = tuple(int(n < up_to) for n in range(WRITES))
        return self.states.rows[0] != "ready" or self.replica.rows == exact


def step(world: World, number: int, protocol: Protocol) -> World:
    """The next durable step of a process."""
    process = world.processes[number]
    steps = {"drain": _drain, "pass": _pass, "transform": _transform, "apply": _apply}
    if process.todo[0] == "copy if needed" and process.step == 0 and world.states.rows[0] == "ready":
        return world.by(number, process.done)
    return steps.get(process.todo[0], _copy)(world, number, process, protocol)


def _drain(world: World, number: int, process: Process, protocol: Protocol) -> World:
    log = world.change_log
    match process.step:
        case 0:
            return world.by(number, process.then(log.position), slot=max(world.slot, log.position))
        case 1:
            (position,) = process.memory
            if world.written <= position:
                return world.by(number, process.done)
            return world.by(number, process.then(position, world.slot, world.written))
        case 2:
            position, begin, end = process.memory
            if log.position != position if protocol.change_log else log.position >= end:
                return world.by(number, process.done)
            appended = log.with_rows((*log.rows, (begin, end)), end)
            return world.by(number, process.then(end), change_log=appended)
        case _:
            (end,) = process.memory
            return world.by(number, process.done, slot=max(world.slot, end))


def _pass(world: World, number: int, process: Process, protocol: Protocol) -> World:
    """Read past all that is written: mark the table as to be copied if it needs that, and append a slice without changes."""
    log, (state, lsn) = world.change_log, world.states.rows
    match process.step:
        case 0:
            return world.by(number, process.then(log.position, world.written))
        case 1:
            position, end = process.memory
            if world.written <= position:
                return world.by(number, process.done)
            is_marked = state in {"ready", "copied", "copying"} and lsn < end
            states = world.states.with_rows(("to be copied", 0), 0) if is_marked else world.states
            return world.by(number, process.then(position, end), states=states)
        case _:
            position, end = process.memory
            appended = log.with_rows(log.rows, end) if log.position == position else log
            return world.by(number, process.done, change_log=appended)


def _transform(world: World, number: int, process: Process, protocol: Protocol) -> World:
    transformed, changes = world.transformed, world.changes
    match process.step:
        case 0:
            return world.by(number, process.then(transformed.version, transformed.position))
        case 1:
            version, position = process.memory
            waiting = [s for s in world.change_log.rows if s[1] > position]
            if not waiting:
                return world.by(number, process.done)
            (begin, end), (state, lsn) = waiting[0], world.states.rows
            included = state in {"ready", "copied"} and lsn < end
            return world.by(number, process.then(version, begin, end, included, lsn))
        case 2:
            version, begin, end, included, lsn = process.memory
            if included and changes.position < end:
                changes = changes.with_rows((*changes.rows, (end, begin, lsn)), end)
            return world.by(number, process.then(version, end, included), changes=changes)
        case _:
            version, end, included = process.memory
            if transformed.version != version if protocol.records else transformed.position >= end:
                return world.by(number, process.done)
            recorded = transformed.with_rows((*transformed.rows, (end, included)), end)
            return world.by(number, process.done, transformed=recorded)


def _apply(world: World, number: int, process: Process, protocol: Protocol) -> World:
    replica = world.replica
    match process.step:
        case 0:
            return world.by(number, process.then(replica.version, replica.position))
        case 1:
            version, position = process.memory
            state, lsn = world.states.rows
            since, cut = max(position, lsn), world.cut
            every = {end for end, _ in world.transformed.rows if end > cut}
            ends = {end for end, included in world.transformed.rows if included and end > max(since, cut)}
            upto = max(every, default=0)
            if not every or (state == "copied" and protocol.cuts):
                return world.by(number, process.done)
            if state != "ready" or not ends:
                cuts = upto if state != "ready" or upto >= since else 0
                return world.by(number, replace(process, step=3, memory=(cuts,)))
            counts = [0] * WRITES
            for end, begin, copied in world.changes.rows:
                for transaction in range(begin, end) if end in ends else ():
                    if transaction >= max(copied, position if protocol.amid_slices else 0):
                        counts[transaction] += 1
            return world.by(number, process.then(version, upto, tuple(counts)))
        case 2:
            version, end, counts = process.memory
            if replica.version != version if protocol.replica else replica.position >= end:
                return world.by(number, process.done)
            rows = tuple(a + b for a, b in zip(replica.rows, counts, strict=True))
            return world.by(number, process.then(end), replica=replica.with_rows(rows, end))
        case _:
            (cut,) = process.memory
            return world.by(number, process.done, cut=max(world.cut, cut))


def _copy(world: World, number: int, process: Process, protocol: Protocol) -> World:
    states, replica = world.states, world.replica
    match process.step:
        case 0:
            return world.by(number, process.then(), states=states.with_rows(("copying", 0), 0))
        case 1:
            return world.by(number, process.then(states.version))
        case 2:
            return world.by(number, process.then(*process.memory, world.written))
        case 3:
            version, lsn = process.memory
            if protocol.states and states.version != version:
                return world.by(number, replace(process, step=1, memory=()))
            return world.by(number, process.then(lsn), states=states.with_rows(("copying", lsn), 0))
        case 4:
            (lsn,) = process.memory
            if replica.position > lsn:
                return world.by(number, process.done)
            rows = tuple(int(n < lsn) for n in range(WRITES))
            return world.by(number, process.then(lsn), replica=replica.with_rows(rows, lsn))
        case 5:
            (lsn,) = process.memory
            if not protocol.fence:
                return world.by(number, process.done, states=states.with_rows(("ready", lsn), 0))
            return world.by(number, process.done if replica.position > lsn else process.then(lsn))
        case 6 | 8:
            # The state is compared and replaced in one step: the append fails if a state was written in between.
            (lsn, *reached) = process.memory
            is_announced = states.rows in {("copying", lsn), ("copied", lsn)}
            if protocol.states and not is_announced:
                return world.by(number, process.done)
            if process.step == 6:
                return world.by(number, process.then(lsn), states=states.with_rows(("copied", lsn), 0))
            state = ("ready", lsn) if reached[0] <= lsn else ("to be copied", 0)
            return world.by(number, process.done, states=states.with_rows(state, 0))
        case _:
            (lsn,) = process.memory
            fenced = world.transformed.with_rows(world.transformed.rows, world.transformed.position)
            return world.by(number, process.then(lsn, fenced.position), transformed=fenced)


def settled(world: World, protocol: Protocol) -> World:
    """The world after one more run without interference."""
    world = replace(world, processes=(Process(("copy if needed", *("drain", "transform") * 4, "apply")),))
    while world.processes[0].todo:
        world = step(world, 0, protocol)
    return world


def _next(world: World, protocol: Protocol) -> Iterator[tuple[str, World]]:
    for number, process in enumerate(world.processes):
        if process.todo:
            yield f"{number}: {process.todo[0]} {process.step}", step(world, number, protocol)
            if process.step and world.deaths < DEATHS:
                yield f"{number} dies", world.by(number, Process(()), deaths=world.deaths + 1)
    if world.written < WRITES:
        yield "write", replace(world, written=world.written + 1)


def steps_to_error(protocol: Protocol, *programs: tuple[str, ...]) -> list[str] | None:
    """The steps to a wrong world, or None if there are none."""
    start = World(tuple(map(Process, programs)))
    reached: dict[World, tuple[str, World] | None] = {start: None}
    waiting = [start]
    while waiting:
        world = waiting.pop()
        right = world.is_right()
        if right and not any(p.todo for p in world.processes):
            after = settled(world, protocol)
            right = after.is_right() and after.replica.position == after.written
        if not right:
            path, before = [], reached[world]
            while before is not None:
                path.append(before[0])
                before = reached[before[1]]
            return path[::-1]
        for what, following in _next(world, protocol):
            if following not in reached:
                reached[following] = (what, world)
                waiting.append(following)
    return None


@pytest.mark.parametrize("programs", PROGRAMS)
def test_no_order_of_steps_loses_or_doubles_a_transaction(programs: tuple[tuple[str, ...], ...]) -> None:
    assert steps_to_error(Protocol(), *programs) is None


@pytest.mark.parametrize(
    "without", ["change_log", "records", "replica", "fence", "amid_slices", "cuts", "states"]
)
def test_no_comparison_of_the_protocol_can_be_left_out(without: str) -> None:
    protocol = replace(Protocol(), **{without: False})
    assert any(steps_to_error(protocol, *programs) for programs in PROGRAMS)

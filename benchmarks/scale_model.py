"""Simulates runs, to see how many changes slots and cores can carry, with the rates of docs/scale.md.

A publisher commits a number of changes per second, spread evenly over the slots. Each slot has a driver,
whose runs follow one another. A run takes the changes that wait at its start. The driver reads them from the
slot, at the slot's rate; then tasks process them, on cores that all drivers share. Out: for each number of
slots and of cores the longest time from a commit to the replica in the second half of `--minutes`, or `grows`
if more changes come than slots and cores carry.

    python benchmarks/scale_model.py --changes 50000 200000 500000 --slots 1 2 4 --cores 2 8 32
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

_STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Rates:
    """Changes per second of a slot, core seconds per change, and the fixed seconds of a run."""

    slot: float
    core: float
    run: float


@dataclass
class Driver:
    """The runs of one slot.

    `waiting` changes have been committed since `since`; the first change of the current run at `oldest`.
    """

    waiting: float = 0.0
    since: float = 0.0
    oldest: float = 0.0
    reading: float = 0.0
    work: float = 0.0
    runs: bool = False

    def begin(self, now: float, rates: Rates) -> None:
        """Start a run with the waiting changes."""
        self.reading = rates.run + self.waiting / rates.slot
        self.work = self.waiting * rates.core
        self.oldest, self.since, self.waiting, self.runs = self.since, now, 0.0, True


def simulate(changes: float, slots: int, cores: int, minutes: float, rates: Rates) -> float | None:
    """The longest delay of a change in the second half; None if delays still grow."""
    drivers, delays = [Driver() for _ in range(slots)], list[tuple[float, float]]()
    for number in range(int(minutes * 60 / _STEP_SECONDS)):
        now = number * _STEP_SECONDS
        sharing = sum(d.runs and d.reading <= 0 for d in drivers)
        for driver in drivers:
            driver.waiting += changes / slots * _STEP_SECONDS
            if not driver.runs:
                driver.begin(now, rates)
            elif driver.reading > 0:
                driver.reading -= _STEP_SECONDS
            elif driver.work > 0:
                driver.work -= _STEP_SECONDS * cores / max(sharing, 1)
            else:
                delays.append((now, now - driver.oldest))
                driver.runs = False
    seconds = minutes * 60
    parts = [[d for at, d in delays if begin <= at / seconds < end] for begin, end in ((0.25, 0.5), (0.5, 1))]
    if not all(parts) or max(parts[1]) > 1.5 * max(parts[0]):
        return None
    return max(parts[1])


def main() -> None:
    """Simulate all combinations, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--changes", type=float, nargs="+", default=[10_000, 50_000, 100_000, 200_000, 400_000]
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--slot-rate", type=float, default=400_000, help="changes per second of one slot")
    parser.add_argument("--core-seconds", type=float, default=7.3, help="core seconds of a million changes")
    parser.add_argument("--run-seconds", type=float, default=4, help="seconds of a run with few changes")
    options = parser.parse_args()
    rates = Rates(options.slot_rate, options.core_seconds / 1e6, options.run_seconds)
    table = Table(
        "changes a second", *(f"{s} slots, {c} cores" for s in options.slots for c in options.cores)
    )
    for changes in options.changes:
        delays = [
            simulate(changes, slots, cores, options.minutes, rates)
            for slots in options.slots
            for cores in options.cores
        ]
        table.add_row(f"{changes:,.0f}", *("grows" if d is None else f"{d:.0f} s" for d in delays))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

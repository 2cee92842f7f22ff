"""What a hard day did and found, what its processes said, and what all days so far come to."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """What a day did, and what it found."""

    seed: int
    did: Counter[str] = field(default_factory=Counter)
    #: Processes by command and how they ended.
    ended: Counter[str] = field(default_factory=Counter)
    #: What was said by those that were refused.
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def kills(self) -> int:
        return self.did["killed at a random moment"] + self.did["killed at a failpoint"]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.seconds:.0f} seconds, {self.kills} kills"]
        for title, counted in (("did", self.did), ("processes", self.ended), ("refusals", self.refusals)):
            lines.append(f"{title}:")
            lines += [f"  {number:6} {what}" for what, number in sorted(counted.items(), key=lambda i: -i[1])]
        lines.append("differences and other findings:" if self.findings else "no difference")
        return "\n".join([*lines, *self.findings])


def read(log: Path) -> str:
    """What a process said; nothing where it did not come that far."""
    return log.read_text(errors="replace") if log.exists() else ""


def said_of(log: Path) -> str:
    """The kind of error that a log ends with: no numbers, one line."""
    text = read(log)
    errors = [line for line in text.splitlines() if line.startswith(("error: ", "unexpected", "problem: "))]
    last = (errors or text.strip().splitlines() or ["nothing"])[-1]
    return re.sub(r"[0-9A-F]+/[0-9A-F]+|\d+", "N", last)[:300]


def accumulate(report: Report, file: Path) -> str:
    """Add a report to those of earlier days; what they come to together."""
    file.parent.mkdir(parents=True, exist_ok=True)
    entry = {
        "seed": report.seed,
        "seconds": round(report.seconds),
        "kills": report.kills,
        "found": report.findings,
    }
    with file.open("a") as log:
        log.write(json.dumps(entry) + "\n")
    days = [json.loads(line) for line in file.read_text().splitlines()]
    kills, seconds = (sum(one[what] for one in days) for what in ("kills", "seconds"))
    found = sum(len(one["found"]) for one in days)
    return f"{len(days)} days so far in {file}: {seconds} seconds, {kills} kills, {found} findings"

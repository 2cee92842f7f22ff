"""The report of a hard day: what happened, what was found, the processes' errors, and the sums over all days so far."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """What happened on a day, and the findings."""

    seed: int
    did: Counter[str] = field(default_factory=Counter)
    #: How often each command ended in which way.
    ended: Counter[str] = field(default_factory=Counter)
    #: How often each refusal was printed.
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
    """The output of a process, or '' if it wrote no log."""
    return log.read_text(errors="replace") if log.exists() else ""


def last_error(log: Path) -> str:
    """The last error in a log, on one line and without numbers, so that equal errors can be counted."""
    text = read(log)
    errors = [line for line in text.splitlines() if line.startswith(("error: ", "unexpected", "problem: "))]
    last = (errors or text.strip().splitlines() or ["nothing"])[-1]
    return re.sub(r"[0-9A-F]+/[0-9A-F]+|\d+", "N", last)[:300]


def accumulate(report: Report, file: Path) -> str:
    """Append a report to the file of earlier days. Return a summary of all days."""
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
    kills, seconds = (sum(each[what] for each in days) for what in ("kills", "seconds"))
    findings = sum(len(each["found"]) for each in days)
    return f"{len(days)} days so far in {file}: {seconds} seconds, {kills} kills, {findings} findings"

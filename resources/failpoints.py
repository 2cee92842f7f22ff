"""Lists the failpoints. A failpoint is a place in the program where a test can end the process, stop it, or make it fail.

There is a failpoint after each durable step, and after some other steps. The environment variable names the failpoint
and what happens there:

- `PGSIEVE_FAILPOINT=slot_created` ends the process by SIGKILL when it reaches this failpoint for the first time
- `slot_created:3` does so when the process reaches it for the third time
- `slot_created!` raises an OSError instead, as if the answer to the preceding write were lost
- `slot_created?` stops the process until it gets SIGCONT

Without the variable a failpoint costs one lookup. The Python workers of a local Spark session inherit the variable,
and the first of them that reaches the failpoint ends. ARCHITECTURE.md, "When a run dies", describes what the next run does.
"""

import errno
import os
import signal
from collections import Counter
from enum import StrEnum

VARIABLE = "PGSIEVE_FAILPOINT"


class Failpoint(StrEnum):
    """The failpoints. Each has the name of what has just been done."""

    CAPTURE_CREATED = "capture_created"
    SLOT_CREATED = "slot_created"
    POSITION_RECORDED = "position_recorded"
    CATALOG_RECORDED = "catalog_recorded"
    SNAPSHOT_EXPORTED = "snapshot_exported"
    COPY_BEGUN = "copy_begun"
    COPY_PLANNED = "copy_planned"
    CHUNK_COPIED = "chunk_copied"
    TABLE_COPIED = "table_copied"
    COPY_FINISHED = "copy_finished"
    TABLES_READY = "tables_ready"
    BATCH_RECEIVED = "batch_received"
    SLICE_WRITTEN = "slice_written"
    SLICE_COMMITTED = "slice_committed"
    SLICE_SUMMARIZED = "slice_summarized"
    ALTERATION_RECORDED = "alteration_recorded"
    SLOT_CONFIRMED = "slot_confirmed"
    CHANGES_WRITTEN = "changes_written"
    SLICE_TRANSFORMED = "slice_transformed"
    REPLICA_COMMITTED = "replica_committed"
    CUT_WRITTEN = "cut_written"


_reach_counts: Counter[str] = Counter()


def reach(failpoint: Failpoint) -> None:
    """If the environment variable names this failpoint, end the process by SIGKILL, stop it, or raise OSError."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    name, _, number = setting.rstrip("!?").partition(":")
    if name == failpoint:
        _reach_counts[failpoint] += 1
        if _reach_counts[failpoint] == int(number or 1):
            if setting.endswith("!"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.kill(os.getpid(), signal.SIGSTOP if setting.endswith("?") else signal.SIGKILL)

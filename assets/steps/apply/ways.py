"""The ways in which a batch is applied to one replica table. `choice` decides which one is taken.

A batch is the changes that are applied to a replica in one commit. In: nothing. Out: the names of the ways, and the errors
that say that a way cannot apply a batch.
"""

from enum import StrEnum

from pgsieve.resources.lake.delta.log import UnmarkableError


class Way(StrEnum):
    """A way to apply a batch. The text says who decides which rows come and go, and who writes them."""

    KEY_PARTS = "tasks decide the changes by parts of the keys, and write files"
    FILES = "the driver decides the changes, and the runner writes files"
    MERGE_IN_PROCESS = "delta-rs merges rows"
    MERGE_BY_SPARK = "Spark merges rows"


class UnsuitedWayError(Exception):
    """A way cannot apply a batch, for a reason that was not known before the changes were read. Nothing was written.

    The message is the reason.
    """


#: The errors after which another way is taken.
UNSUITED_ERRORS = (UnsuitedWayError, UnmarkableError)

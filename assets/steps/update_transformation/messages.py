"""Messages of the change log, as Spark reads them, or as this process does where they are few.

In: slices of a change log, and which of their messages. Out: an Arrow table in the messages' order, or a DataFrame, for which
there is no session before somebody asks. Raises LakeError.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.columns import Order, order
from pgsieve.resources.lake.lake import Lake

#: The ordinal of an order key before those of all changes of a transaction.
FIRST = -1
_CHANGES = ("I", "U", "D")


@dataclass(frozen=True)
class Choice:
    """Some messages: between two order keys, without one transaction's, and of the changes those of some relations.

    What is None does not restrict them.
    """

    after: Order | None = None
    before: Order | None = None
    without: int | None = None
    relations: Collection[int] | None = None

    def of_frame(self, messages: DataFrame) -> DataFrame:
        """These messages, by Spark."""
        rows, lsn = messages, F.col("commit_lsn")
        if self.relations is not None:
            rows = rows.where(
                F.col("relation_id").isin(sorted(self.relations)) & F.col("kind").isin(*_CHANGES)
            )
        if self.after is not None:
            # Files have bounds of the LSN, and none of the order key.
            rows = rows.where(lsn >= self.after[0]).where(order() > _at(self.after))
        if self.before is not None:
            rows = rows.where(lsn <= self.before[0]).where(order() < _at(self.before))
        return rows if self.without is None else rows.where(lsn != self.without)

    def of_table(self, messages: pa.Table) -> pa.Table:
        """These messages, in this process."""
        lsn, ordinal = (np.asarray(messages[name]) for name in ("commit_lsn", "ordinal"))
        chosen = np.ones(messages.num_rows, np.bool_)
        if self.relations is not None:
            of = pc.is_in(messages["relation_id"], pa.array(sorted(self.relations), pa.int64()))
            chosen &= np.asarray(of) & np.asarray(pc.is_in(messages["kind"], pa.array(_CHANGES)))
        if self.after is not None:
            chosen &= (lsn > self.after[0]) | (lsn == self.after[0]) & (ordinal > self.after[1])
        if self.before is not None:
            chosen &= (lsn < self.before[0]) | (lsn == self.before[0]) & (ordinal < self.before[1])
        if self.without is not None:
            chosen &= lsn != self.without
        return messages.filter(pa.array(chosen))


def _at(at: Order) -> Column:
    return F.struct(
        F.lit(at[0]).cast("bigint").alias("commit_lsn"), F.lit(at[1]).cast("bigint").alias("ordinal")
    )


class Messages:
    """Messages of the change log: `table` where they are few, None else; `frame` is made when Spark is asked."""

    def __init__(self, frame: Callable[[], DataFrame], table: pa.Table | None = None) -> None:
        self._frame, self.table = cache(frame), table

    @property
    def frame(self) -> DataFrame:
        """The messages for Spark."""
        return self._frame()

    def chosen(self, choice: Choice) -> "Messages":
        """The messages of a choice."""
        table = None if self.table is None else choice.of_table(self.table)
        return Messages(lambda: choice.of_frame(self.frame), table)

    def commits(self) -> list[int]:
        """The commit LSNs of the messages, in order."""
        lsns = self.frame.select("commit_lsn").distinct().toArrow() if self.table is None else self.table
        return sorted(pc.unique(lsns["commit_lsn"]).to_pylist())


def messages_of(lake: Lake, path: str, ends: Collection[int], size: int | None) -> Messages:
    """The messages of some slices, `size` bytes (None: many); raises DamagedTableError where one of them is lost."""
    table = lake.slice_rows(path, ends, size, every=True)

    def frame() -> DataFrame:
        return lake.slices_of(path, ends, every=True)

    if table is not None:
        return Messages(frame, table)
    messages = frame()  # Now, as what is lost is to be heard of now.
    return Messages(lambda: messages)

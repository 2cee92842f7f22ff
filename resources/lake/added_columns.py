"""Adds columns that a table lacks, by a commit of delta-rs without rows.

In: a table, and the columns that its new rows have
Out: at most one commit, which keeps the table's position (the LSN up to which the table has all changes)

Raises LakeError.
"""

import pyarrow as pa

from pgsieve.resources.lake.committers import SparkCommitter
from pgsieve.resources.lake.delta.errors import retry_after_conflict
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.requirements import lacks_columns
from pgsieve.resources.lake.lake import Lake


def add_missing_columns(lake: Lake, path: str, schema: pa.Schema) -> bool:
    """Add the columns of `schema` that a table lacks, also within structs. Return True if some were added.

    They are NULL in all rows that exist. Nothing is added if there is no table, if only Spark can write it, or if one of
    its columns has another type.
    """
    committer = lake.policy.choose_small_committer(path)
    if isinstance(committer, SparkCommitter) or not lake.records.exists(path):
        return False
    with lake.access.translate_errors(path):
        if not lacks_columns(committer.delta_rs.open_table(path), schema):
            return False
    retry_after_conflict(committer.write)(path, schema.empty_table(), Commit())
    return True

"""Tells whether a Delta table has a change data feed, and whether its columns allow one.

In: a table's properties, and the names of its columns. Out: booleans, and the columns that allow no feed. Raises nothing.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Change Data Files; Add CDC File)
"""

from collections.abc import Iterable, Mapping

#: The property that gives a table a feed.
FEED_PROPERTY = "delta.enableChangeDataFeed"
#: The column of the feed that says what a commit does to a row.
CHANGE_TYPE = "_change_type"
#: The columns that a feed adds to those of its table. A table that has such a column itself cannot have a feed.
_FEED_COLUMNS = {CHANGE_TYPE, "_commit_version", "_commit_timestamp"}


def find_reserved_columns(columns: Iterable[str]) -> list[str]:
    """The columns that are named like a column of the feed. Case is ignored, because Spark ignores it."""
    return [name for name in columns if name.lower() in _FEED_COLUMNS]


def has_feed(properties: Mapping[str, str]) -> bool:
    """True if a table with these properties has a feed. Spark accepts the value in upper and lower case."""
    return properties.get(FEED_PROPERTY, "false").lower() == "true"


def is_feed_impossible(properties: Mapping[str, str], columns: Iterable[str]) -> bool:
    """True if a table with these properties has a feed, which it cannot have with these columns."""
    return has_feed(properties) and bool(find_reserved_columns(columns))

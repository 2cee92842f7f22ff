"""Tests once per lake and server whether a store refuses the second of two commits of one version.

In: a lake's address and its store, which has S3's interface. Out: nothing if the store does; an empty object
in the lake may record this result. Raises UnsafeStoreError if two commits of one version succeed, or if the store does not support
the condition, and delta-rs's errors if the store refuses.

Two writers at a time create the same table below `_pgsieve/_commits_tried/`, which is removed at the end.
delta-rs first checks whether the table exists. So only a pair in which both writers come to the commit is
evidence: either the store refuses the slower writer, or a commit is lost.
"""

import logging
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from threading import Barrier

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.paths import OWN_FOLDER, escape
from pgsieve.resources.lake.stores.store import Store

#: How many pairs the store has to decide: a store that only looks before it writes would still decide most
#: pairs correctly. Also the largest number of pairs that are tried, and how many are tried at a time.
_SEEN, _TRIED, _PARALLEL = 24, 160, 8
_SCHEMA = Schema.from_arrow(pa.schema([("number", pa.int64())]))
#: delta-rs's message if it finds the table before it tries to commit.
_EARLIER = "table already exists"
#: Messages of servers that do not support the condition.
_UNKNOWN = re.compile(r"NotImplemented|Status: 501|status code\s+501|\b501 Not Implemented")

_LOGGER = logging.getLogger(__name__)


class UnsafeStoreError(PgsieveError):
    """The lake's store does not keep the first of two commits of one version."""

    def __init__(self, lake: str, endpoint: str, why: str) -> None:
        super().__init__(
            f'lake "{lake}": the server at {endpoint} {why}: commits to the lake could be lost',
            hint='use a server that keeps If-None-Match on PUT (pgsieve\'s documentation, "No commit is lost", names some), or a newer version of this one;'
            " or, if one Spark session or Spark Connect server is the lake's only writer, set"
            " `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )


class _Ended(Enum):
    """How a writer's commit ended: it succeeded, the store refused it, or delta-rs saw the other commit before."""

    MADE = auto()
    REFUSED = auto()
    TOO_LATE = auto()


def check_commits_are_kept(lake: str, store: Store, endpoint: str, *, record: bool) -> None:
    """Raise UnsafeStoreError if the server at an endpoint may lose a commit to the lake.

    With `record` the lake records a good result, so that it is not tested again.
    """
    marker = f"{lake}/{OWN_FOLDER}/_commits_kept/{escape(endpoint)}"
    if store.has(marker):
        return
    folder = f"{lake}/{OWN_FOLDER}/_commits_tried/{uuid.uuid4().hex}"
    try:
        decided = _decided_pairs(lake, folder, store, endpoint)
    finally:
        store.remove(folder)
    if decided < _SEEN:
        _LOGGER.debug(
            'lake "%s": of %d pairs of commits only %d met: the next run tries again', lake, _TRIED, decided
        )
    elif record:
        store.touch(marker)


def _decided_pairs(lake: str, folder: str, store: Store, endpoint: str) -> int:
    """How many pairs of commits met in the store, which then refused one of them."""
    decided = tried = 0
    with ThreadPoolExecutor(2 * _PARALLEL) as pool:
        while decided < _SEEN and tried < _TRIED:
            # Pairs run in parallel, as each takes some twenty requests in sequence.
            numbers = range(tried, min(tried + min(_PARALLEL, _SEEN - decided), _TRIED))
            pairs = [
                [pool.submit(_made, f"{folder}/{number}", store, together) for _ in range(2)]
                for number, together in ((number, Barrier(2)) for number in numbers)
            ]
            try:
                ends = [[writer.result() for writer in pair] for pair in pairs]
            except (DeltaError, OSError) as error:
                if _UNKNOWN.search(str(error)):
                    why = "does not know If-None-Match on PUT"
                    raise UnsafeStoreError(lake, endpoint, why) from error
                raise
            if [_Ended.MADE] * 2 in ends:
                why = "does not keep If-None-Match on PUT: it accepted two objects of one name"
                raise UnsafeStoreError(lake, endpoint, why)
            met = [_Ended.MADE.name, _Ended.REFUSED.name]
            decided += sum(sorted(e.name for e in ended) == met for ended in ends)
            tried += len(numbers)
    return decided


def _made(path: str, store: Store, together: Barrier) -> _Ended:
    together.wait()
    try:
        DeltaTable.create(
            path,
            _SCHEMA,
            storage_options=dict(store.options),
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    except CommitFailedError:
        return _Ended.REFUSED
    except DeltaError as error:
        if _EARLIER in str(error):
            return _Ended.TOO_LATE
        raise
    return _Ended.MADE

"""Tests once per lake and server whether a store refuses the second of two commits of one version.

In: a lake's address and its store, which has S3's interface. Out: a good result may be recorded in the lake, as
an empty object. Raises UnsafeStoreError if two commits of one version succeed, or if the store does not support
conditional PUTs, and delta-rs's errors if the store refuses access.

Pairs of writers create the same table below `_pgsieve/_commits_tried/`, which is removed at the end. delta-rs
first checks whether the table exists. So a pair is evidence only if both writers reach the commit: then the
store refuses the slower writer, or a commit is lost.
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

#: The number of pairs that must be evidence: a store that checks and then writes, without atomicity, still
#: decides most pairs correctly.
_DECIDED_PAIRS = 24
_MAX_PAIRS = 160
_PARALLEL_PAIRS = 8
_SCHEMA = Schema.from_arrow(pa.schema([("number", pa.int64())]))
#: delta-rs's message if the table exists before the commit.
_TABLE_EXISTS = "table already exists"
#: Messages of servers that do not support the condition.
_UNSUPPORTED = re.compile(r"NotImplemented|Status: 501|status code\s+501|\b501 Not Implemented")

_LOGGER = logging.getLogger(__name__)


class UnsafeStoreError(PgsieveError):
    """The lake's store may overwrite the first of two commits of one version."""

    def __init__(self, lake: str, endpoint: str, reason: str) -> None:
        super().__init__(
            f'lake "{lake}": the server at {endpoint} {reason}: commits to the lake could be lost',
            hint='use a server that keeps If-None-Match on PUT (pgsieve\'s documentation, "No commit is lost", names some), or a newer version of this one;'
            " or, if one Spark session or Spark Connect server is the lake's only writer, set"
            " `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )


class _Outcome(Enum):
    """The outcome of a writer's commit: it succeeded, the store refused it, or delta-rs saw the other commit before."""

    MADE = auto()
    REFUSED = auto()
    TOO_LATE = auto()


def check_conditional_put(lake: str, store: Store, endpoint: str, *, record: bool) -> None:
    """Raise UnsafeStoreError if the server at an endpoint may lose a commit to the lake.

    With `record` the lake records a good result, so that it is not tested again.
    """
    marker = f"{lake}/{OWN_FOLDER}/_commits_kept/{escape(endpoint)}"
    if store.has_file(marker):
        return
    folder = f"{lake}/{OWN_FOLDER}/_commits_tried/{uuid.uuid4().hex}"
    try:
        decided_pairs = _count_decided_pairs(lake, folder, store, endpoint)
    finally:
        store.remove(folder)
    if decided_pairs < _DECIDED_PAIRS:
        _LOGGER.debug(
            'lake "%s": of %d pairs of commits only %d met: the next run tries again',
            lake,
            _MAX_PAIRS,
            decided_pairs,
        )
    elif record:
        store.touch(marker)


def _count_decided_pairs(lake: str, folder: str, store: Store, endpoint: str) -> int:
    """Try pairs of commits; return the number of pairs in which the store refused one of two commits."""
    decided_pairs = tried_pairs = 0
    with ThreadPoolExecutor(2 * _PARALLEL_PAIRS) as pool:
        while decided_pairs < _DECIDED_PAIRS and tried_pairs < _MAX_PAIRS:
            # A pair takes some twenty requests in sequence, so pairs run in parallel.
            numbers = range(
                tried_pairs,
                min(tried_pairs + min(_PARALLEL_PAIRS, _DECIDED_PAIRS - decided_pairs), _MAX_PAIRS),
            )
            pairs = [
                [pool.submit(_commit, f"{folder}/{number}", store, barrier) for _ in range(2)]
                for number, barrier in ((number, Barrier(2)) for number in numbers)
            ]
            try:
                outcomes = [[writer.result() for writer in pair] for pair in pairs]
            except (DeltaError, OSError) as error:
                if _UNSUPPORTED.search(str(error)):
                    reason = "does not know If-None-Match on PUT"
                    raise UnsafeStoreError(lake, endpoint, reason) from error
                raise
            if [_Outcome.MADE] * 2 in outcomes:
                reason = "does not keep If-None-Match on PUT: it accepted two objects of one name"
                raise UnsafeStoreError(lake, endpoint, reason)
            evidence = [_Outcome.MADE.name, _Outcome.REFUSED.name]
            decided_pairs += sum(sorted(each.name for each in pair) == evidence for pair in outcomes)
            tried_pairs += len(numbers)
    return decided_pairs


def _commit(path: str, store: Store, barrier: Barrier) -> _Outcome:
    barrier.wait()
    try:
        DeltaTable.create(
            path,
            _SCHEMA,
            storage_options=dict(store.options),
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    except CommitFailedError:
        return _Outcome.REFUSED
    except DeltaError as error:
        if _TABLE_EXISTS in str(error):
            return _Outcome.TOO_LATE
        raise
    return _Outcome.MADE

"""Checks whether an object store refuses the second of two commits with the same version number.

A commit of a Delta table is an object whose name has the version number. A writer creates it on the condition that
no object of this name exists (a conditional PUT). Some servers with the interface of S3 ignore this condition, so
that one commit overwrites another.

In: - the address of a lake
    - the lake's object store, which has the interface of S3
Out: nothing, if the store is safe. This result may be recorded in the lake, as an empty object, so that each lake and
     server is checked only once.

Raises UnsafeStoreError if two commits of the same version succeed, or if the store does not support conditional
PUTs. Raises delta-rs's errors if the store refuses the access.

The check lets pairs of writers create the same table below `_pgsieve/_commits_tried/`, and removes this folder at
the end. delta-rs first looks whether the table exists, so the second writer of a pair may find the table and not try to
commit. Such a pair decides nothing. If both writers try to commit, either the store refuses the slower writer, or one
commit is lost.
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

#: A store counts as safe once it has refused one commit in this number of pairs. One pair would not be enough: a store
#: that checks the condition and writes in two separate steps handles most pairs correctly.
_MIN_DECIDED_PAIRS = 24
#: The largest number of pairs that are tried, and the number of pairs that are tried at the same time.
_MAX_PAIRS = 160
_PARALLEL_PAIRS = 8
_SCHEMA = Schema.from_arrow(pa.schema([("number", pa.int64())]))
#: A part of delta-rs's message if the table existed before the writer tried to commit.
_TABLE_EXISTS = "table already exists"
#: Messages of servers that do not support conditional PUTs.
_UNSUPPORTED = re.compile(r"NotImplemented|Status: 501|status code\s+501|\b501 Not Implemented")

_LOGGER = logging.getLogger(__name__)


class UnsafeStoreError(PgsieveError):
    """The lake's store may overwrite the first of two commits that have the same version number."""

    def __init__(self, lake: str, endpoint: str, reason: str) -> None:
        super().__init__(
            f'lake "{lake}": the server at {endpoint} {reason}: commits to the lake could be lost',
            hint='use a server that honours If-None-Match on PUT (pgsieve\'s documentation, "No commit is lost", names some), or a newer version of this one;'
            " or, if one Spark session or Spark Connect server is the lake's only writer, set"
            " `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )


class _Outcome(Enum):
    """The outcome of a writer's commit.

    - SUCCEEDED: the table was created
    - REFUSED: the store has refused the commit
    - TOO_LATE: delta-rs has found the table of the other writer, and has not tried to commit
    """

    SUCCEEDED = auto()
    REFUSED = auto()
    TOO_LATE = auto()


def check_conditional_put(lake: str, store: Store, endpoint: str, *, record: bool) -> None:
    """Raise UnsafeStoreError if the server at `endpoint` may lose a commit to the lake.

    With `record` the lake records a good result, so that it is not checked again.
    """
    record_path = f"{lake}/{OWN_FOLDER}/_commits_kept/{escape(endpoint)}"
    if store.has_file(record_path):
        return
    trial_folder = f"{lake}/{OWN_FOLDER}/_commits_tried/{uuid.uuid4().hex}"
    try:
        decided_pairs = _count_decided_pairs(lake, trial_folder, store, endpoint)
    finally:
        store.remove(trial_folder)
    if decided_pairs < _MIN_DECIDED_PAIRS:
        _LOGGER.debug(
            'lake "%s": of %d pairs of commits only %d overlapped: the next run tries again',
            lake,
            _MAX_PAIRS,
            decided_pairs,
        )
    elif record:
        store.touch(record_path)


def _count_decided_pairs(lake: str, folder: str, store: Store, endpoint: str) -> int:
    """Try pairs of commits. Return the number of pairs in which the store has refused one of two commits."""
    decided_pairs = tried_pairs = 0
    with ThreadPoolExecutor(2 * _PARALLEL_PAIRS) as pool:
        while decided_pairs < _MIN_DECIDED_PAIRS and tried_pairs < _MAX_PAIRS:
            # A pair takes some twenty requests, one after the other, so several pairs run at the same time.
            pair_numbers = range(
                tried_pairs,
                min(tried_pairs + min(_PARALLEL_PAIRS, _MIN_DECIDED_PAIRS - decided_pairs), _MAX_PAIRS),
            )
            pairs = [
                [pool.submit(_commit, f"{folder}/{number}", store, barrier) for _ in range(2)]
                for number, barrier in ((number, Barrier(2)) for number in pair_numbers)
            ]
            try:
                outcomes = [[writer.result() for writer in pair] for pair in pairs]
            except (DeltaError, OSError) as error:
                if _UNSUPPORTED.search(str(error)):
                    reason = "does not know If-None-Match on PUT"
                    raise UnsafeStoreError(lake, endpoint, reason) from error
                raise
            if [_Outcome.SUCCEEDED] * 2 in outcomes:
                reason = "does not honour If-None-Match on PUT: it accepted two objects of one name"
                raise UnsafeStoreError(lake, endpoint, reason)
            decided_outcomes = [_Outcome.SUCCEEDED.name, _Outcome.REFUSED.name]
            decided_pairs += sum(
                sorted(outcome.name for outcome in pair) == decided_outcomes for pair in outcomes
            )
            tried_pairs += len(pair_numbers)
    return decided_pairs


def _commit(path: str, store: Store, barrier: Barrier) -> _Outcome:
    """Create the table as one writer of a pair. The barrier makes both writers of the pair begin at the same time."""
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
    return _Outcome.SUCCEEDED

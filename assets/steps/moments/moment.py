"""Converts a moment that a user names, an LSN or a time, to an LSN. The moment has the transactions that commit before it.

A time stands for the place in the WAL before the first transaction with a later commit time. PostgreSQL's recovery
with recovery_target_time stops at the same place (recoveryStopsBefore() in
src/backend/access/transam/xlogrecovery.c). Commit times are in the change histories (Delta tables with all changes of a
table), so a time has to lie between two of their commits. Raises MomentError if it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import TableStates, list_history_paths
from pgsieve.decoding.changes.copied_rows import IS_CHANGE
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.lake.lake import Lake


class MomentError(PgsieveError):
    """The replicas cannot be read as they were at a moment."""


@dataclass(frozen=True)
class Moment:
    """A moment: the LSN at which the replicas of a subscription are read.

    All changes up to `complete_lsn` were read from the slot, decoded and filtered. If nothing has changed lately, this LSN
    is beyond the last slice (changes between two positions of the slot) and beyond the last cut (versions of
    all replicas at one LSN).

    If `is_of_newest_cut` is true, the user did not name a moment. Then a table that the newest cut lacks is left out, for
    example a table that is set aside; the commands say why. Otherwise such a table is read exactly, or refused.
    """

    lake: Lake
    subscription: str
    lsn: int
    complete_lsn: int = 0
    is_of_newest_cut: bool = False

    @classmethod
    def from_user_input(cls, lake: Lake, subscription: str, moment: str | datetime) -> "Moment":
        """The moment that a user names by an LSN, or by a time with its time zone.

        An LSN is written as PostgreSQL does, and a time may be a text in ISO 8601.
        """
        if isinstance(moment, str):
            if "/" in moment:
                return cls(lake, subscription, parse_lsn(moment))
            moment = _parse_time(moment)
        if moment.tzinfo is None:
            raise MomentError(
                f'the time "{moment.isoformat(" ")}" has no time zone',
                hint=f'add its time zone: "{moment.isoformat(" ")}+00:00" is UTC',
                sqlstate="22007",
            )
        return cls(lake, subscription, _find_lsn(TableStates(lake, subscription), moment))


def _parse_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise MomentError(
            f'"{text[:40]}" is neither an LSN nor a time',
            hint='an LSN is written 16/B374D848, a time "2026-03-01 12:00:00+00:00"',
            sqlstate="22007",
        ) from None


def _find_lsn(states: TableStates, time: datetime) -> int:
    """Find an LSN at the place in the WAL for which a time stands."""
    lake, subscription = states.lake, states.subscription
    all_paths = list_history_paths(lake.paths.change_history, subscription, states.read_newest())
    paths = [path for path in all_paths if lake.records.exists(path)]
    later_lsns = _find_lsn_bounds(lake, paths, "min", "commit_time > {time}", time)
    subject = f'subscription "{subscription}" at {time.isoformat(" ")}'
    if not later_lsns:
        raise MomentError(
            f"{subject}: no commit after that time has been replicated, so earlier ones may still arrive",
            hint="apply later changes by `pgsieve run`, or read the newest rows: leave `--at` out",
            sqlstate="22023",
        )
    first_lsn = min(later_lsns)
    earlier_lsns = _find_lsn_bounds(lake, paths, "max", f"commit_lsn < {first_lsn:d}", time)
    if not earlier_lsns:
        raise MomentError(
            f"{subject}: the first change that is kept, at LSN {format_lsn(first_lsn)}, is later",
            hint=_make_early_time_hint(states, time, first_lsn),
            sqlstate="22023",
        )
    # If the result were `first_lsn`, copies that were made after the last earlier commit would belong to the moment, too.
    return max(earlier_lsns) + 1


def _make_early_time_hint(states: TableStates, time: datetime, first_lsn: int) -> str:
    """The hint for a time before the first change that is kept, which is at `first_lsn`.

    The time of a copy was read just before its snapshot was made, which may have waited for transactions. So between both, the
    records do not tell which commits the copy has, and no LSN stands for such a time.
    """
    deleted_up_to = SubscriptionRecord(states.lake, states.subscription).read_state().deleted_up_to
    copies = [
        (state.lsn, record.time)
        for state in states.read_newest().values()
        if state.definition and (record := state.definition.published) and record.time
    ]
    if not copies or deleted_up_to is None or deleted_up_to > min(copies)[0]:
        return "name an LSN; how long changes are kept is `retention.changes` in pgsieve.yaml"
    copy_lsn, copy_time = min(copies)
    if time < copy_time:
        return f"the tables were copied later: the first copy has the rows at LSN {format_lsn(copy_lsn)}"
    return (
        f"if the tables had been copied by then, name LSN {format_lsn(first_lsn)}: nothing changed in between"
    )


def _find_lsn_bounds(
    lake: Lake, paths: Sequence[str], bound: Literal["min", "max"], condition: str, time: datetime
) -> list[int]:
    """Find the least or the greatest commit LSN in each history, among the changes that meet a condition.

    A history without such changes is left out.
    """
    bounds, condition = [], f"{condition} and {IS_CHANGE}"
    for path in paths:
        lsn = lake.find_column_bound(bound, path, "commit_lsn", condition, time)
        if lsn is not None:
            bounds.append(int(lsn))
    return bounds

"""The section `retention` of pgsieve.yaml, and other durations in the file, such as times to wait.

In: a text such as `7 days`, `off` or `forever`
Out: a timedelta, or None for `forever`

Raises errors that become a ConfigError.
"""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

_DURATIONS_BY_UNIT = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
_RETENTIONS_BY_WORD = {"off": timedelta(), "forever": None}
#: Old versions of a table are retained at least this long. A reader or a run that began with an old version still needs
#: its files.
_MIN_VERSIONS_RETENTION = timedelta(hours=2)


def _make_refusal(message: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


def _parse_retention(value: object) -> timedelta | None:
    if isinstance(value, timedelta) or value is None:
        return value
    if isinstance(value, str) and value in _RETENTIONS_BY_WORD:
        return _RETENTIONS_BY_WORD[value]
    match = re.fullmatch(r"([1-9][0-9]{0,4}) (hour|day|week)s?", str(value))
    if not match:
        raise _make_refusal(
            "is not a time", "a number of hours, days or weeks, as in `7 days`; `off`; `forever`"
        )
    return int(match[1]) * _DURATIONS_BY_UNIT[match[2]]


def _parse_wait(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"([1-9][0-9]{0,4}) (minute|hour|day|week)s?", str(value))
    if not match:
        raise _make_refusal(
            "is not a time to wait for", "a number of minutes, hours, days or weeks, as in `15 minutes`"
        )
    return int(match[1]) * _DURATIONS_BY_UNIT.get(match[2], timedelta(minutes=1))


#: A time to wait, for example `15 minutes`.
WaitTime = Annotated[timedelta, BeforeValidator(_parse_wait)]


def _parse_versions_retention(value: object) -> timedelta:
    retention = _parse_retention(value)
    if retention is None or retention < _MIN_VERSIONS_RETENTION:
        raise _make_refusal(
            "should be a time of 2 hours at least", "readers need recent versions; `forever` is not possible"
        )
    return retention


class RetentionConfig(BaseModel):
    """How long applied changes and old versions of tables are retained. None retains them for ever.

    `change_log` is for the slot's messages in the lake, `changes` for the change histories (the changes of each table).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    change_log: Annotated[timedelta | None, BeforeValidator(_parse_retention)] = timedelta(days=7)
    changes: Annotated[timedelta | None, BeforeValidator(_parse_retention)] = timedelta(days=30)
    versions: Annotated[timedelta, BeforeValidator(_parse_versions_retention)] = timedelta(days=7)

"""Times of pgsieve.yaml: how long changes and versions are kept, and how long to wait.

In: text (`7 days`, `off`, `forever`). Out: times. Raises errors that pydantic turns into a ConfigError.
"""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

_UNITS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
_WORDS = {"off": timedelta(), "forever": None}
#: Readers and runs that go on need the files of recent versions, although newer ones exist.
_LEAST = timedelta(hours=2)


def _refused(message: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


def _time(value: object) -> timedelta | None:
    if isinstance(value, timedelta) or value is None:
        return value
    if value in _WORDS:
        return _WORDS[str(value)]
    match = re.fullmatch(r"([1-9][0-9]{0,4}) (hour|day|week)s?", str(value))
    if not match:
        raise _refused("is not a time", "a number of hours, days or weeks, as in `7 days`; `off`; `forever`")
    return int(match[1]) * _UNITS[match[2]]


def _wait(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"([1-9][0-9]{0,4}) (minute|hour|day|week)s?", str(value))
    if not match:
        raise _refused(
            "is not a time to wait for", "a number of minutes, hours, days or weeks, as in `15 minutes`"
        )
    return int(match[1]) * _UNITS.get(match[2], timedelta(minutes=1))


#: A time to wait.
Wait = Annotated[timedelta, BeforeValidator(_wait)]


def _versions(value: object) -> timedelta:
    time = _time(value)
    if time is None or time < _LEAST:
        raise _refused(
            "should be a time of 2 hours at least", "old versions cannot be kept for ever, nor not at all"
        )
    return time


class RetentionConfig(BaseModel):
    """How long applied changes and old versions of tables are kept; None is for ever."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    change_log: Annotated[timedelta | None, BeforeValidator(_time)] = timedelta(days=7)
    changes: Annotated[timedelta | None, BeforeValidator(_time)] = timedelta(days=30)
    versions: Annotated[timedelta, BeforeValidator(_versions)] = timedelta(days=7)

"""Reads the values of output plugin options as the server does.

Raises OutputPluginOptionError with the option's name, and with its value, because options contain no data.
"""

from __future__ import annotations

from pgsieve.decoding.plugins.interface import OutputPluginOptionError
from pgsieve.decoding.values.booleans import BOOLEANS


def parse_bool(name: str, value: str | None) -> bool:
    """A boolean as parse_bool reads it; a missing value is true."""
    if value is None:
        return True
    if value.lower() not in BOOLEANS:
        raise OutputPluginOptionError(
            f'could not parse value "{value}" for parameter "{name}"',
            hint="write on or off",
            sqlstate="22023",
        )
    return BOOLEANS[value.lower()]


def unknown_option(name: str, value: str | None, names: tuple[str, ...]) -> OutputPluginOptionError:
    """The error for an option that a plugin does not have."""
    shown = "(null)" if value is None else value
    return OutputPluginOptionError(
        f'option "{name}" = "{shown}" is unknown', hint=f"options: {', '.join(names)}", sqlstate="22023"
    )

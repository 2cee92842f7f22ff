"""Parses options of output plugins as the server does.

Raises OutputPluginOptionError with the option's name and value. An error may show these, because options contain no
values of rows.
"""

from __future__ import annotations

from pgsieve.decoding.plugins.interface import OutputPluginOptionError
from pgsieve.decoding.values.booleans import BOOLEANS


def parse_bool(name: str, value: str | None) -> bool:
    """Parse a boolean as the server's parse_bool does; an option without a value is true."""
    if value is None:
        return True
    if value.lower() not in BOOLEANS:
        raise OutputPluginOptionError(
            f'could not parse value "{value}" for parameter "{name}"',
            hint="write on or off",
            sqlstate="22023",
        )
    return BOOLEANS[value.lower()]


def unknown_option_error(name: str, value: str | None, names: tuple[str, ...]) -> OutputPluginOptionError:
    """Return the error for an option that a plugin does not have."""
    value_text = "(null)" if value is None else value
    return OutputPluginOptionError(
        f'option "{name}" = "{value_text}" is unknown', hint=f"options: {', '.join(names)}", sqlstate="22023"
    )

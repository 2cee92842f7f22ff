"""Output plugins: callbacks that turn a slot's messages into text, JSON or pgoutput's messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pgsieve.decoding.plugins import json_lines, pgoutput, test_decoding
from pgsieve.decoding.plugins.interface import OutputPluginError, OutputPluginInit

PLUGINS: Mapping[str, OutputPluginInit] = MappingProxyType(
    {"json": json_lines.init, "pgoutput": pgoutput.init, "test_decoding": test_decoding.init}
)


def find_plugin(name: str) -> OutputPluginInit:
    """Return the output plugin of this name; raises OutputPluginError if there is none."""
    if name not in PLUGINS:
        raise OutputPluginError(
            f'output plugin "{name}" does not exist', hint=f"plugins: {', '.join(PLUGINS)}", sqlstate="58P01"
        )
    return PLUGINS[name]

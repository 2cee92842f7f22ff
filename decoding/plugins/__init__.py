"""Output plugins: callbacks that turn a slot's messages into text, JSON or pgoutput's own messages.

In: a name. Out: the plugin. Raises OutputPluginError for an unknown name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pgsieve.decoding.plugins import json_lines, pgoutput, test_decoding
from pgsieve.decoding.plugins.interface import OutputPluginError, OutputPluginInit

PLUGINS: Mapping[str, OutputPluginInit] = MappingProxyType(
    {"json": json_lines.init, "pgoutput": pgoutput.init, "test_decoding": test_decoding.init}
)


def plugin(name: str) -> OutputPluginInit:
    """The output plugin of this name."""
    if name not in PLUGINS:
        raise OutputPluginError(
            f'output plugin "{name}" does not exist', hint=f"plugins: {', '.join(PLUGINS)}", sqlstate="58P01"
        )
    return PLUGINS[name]

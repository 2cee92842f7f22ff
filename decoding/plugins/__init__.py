"""Output plugins: callbacks that make text, JSON or pgoutput's own messages of what a slot sends.

A name in, the plugin out; raises OutputPluginError for a name that is none.
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

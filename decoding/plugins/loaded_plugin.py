"""Calls the callbacks of an output plugin by name, and knows which of them are required.

In: a callback's name and arguments. Out: the callback's output. Raises MissingCallbackError, with the
messages and codes of src/backend/replication/logical/logical.c, and the plugin's own errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from pgsieve.decoding.plugins.interface import (
    DecodingContext,
    MissingCallbackError,
    Output,
    OutputPluginInit,
    OutputType,
)

_STREAMING = "logical streaming requires a {}_cb callback"
_TWO_PHASE = "logical replication at prepare time requires a {}_cb callback"

#: The messages for missing callbacks of an active group. Other callbacks may be missing, and are then not
#: called.
_MISSING = MappingProxyType(
    {
        "stream_start": _STREAMING,
        "stream_stop": _STREAMING,
        "stream_abort": _STREAMING,
        "stream_commit": _STREAMING,
        "stream_change": _STREAMING,
        "begin_prepare": _TWO_PHASE,
        "prepare": _TWO_PHASE,
        "commit_prepared": _TWO_PHASE,
        "rollback_prepared": _TWO_PHASE,
        "stream_prepare": "logical streaming at prepare time requires a {}_cb callback",
    }
)


class LoadedPlugin:
    """A plugin from its startup to its shutdown."""

    def __init__(
        self, init: OutputPluginInit, options: Sequence[tuple[str, str | None]], server_version: int
    ) -> None:
        self._callbacks = init()
        self._context = DecodingContext(
            options,
            streaming=self._callbacks.streaming,
            two_phase=self._callbacks.two_phase,
            server_version=server_version,
        )
        if self._callbacks.startup is not None:
            is_init = False  # The slot exists already; the plugin does not create it.
            self._callbacks.startup(self._context, self._context.options, is_init)

    def shutdown(self) -> None:
        """Let the plugin release its resources."""
        if self._callbacks.shutdown is not None:
            self._callbacks.shutdown(self._context)

    @property
    def output_type(self) -> OutputType:
        """Whether the plugin writes text or bytes."""
        return self._context.options.output_type

    @property
    def streaming(self) -> bool:
        """Whether the plugin is called for transactions in progress."""
        return self._context.streaming

    def refuses_origin(self, origin: str | None) -> bool:
        """Whether transactions of this origin are left out."""
        refuses = self._callbacks.filter_by_origin
        return refuses is not None and refuses(self._context, origin)

    def decodes_prepare(self, xid: int, gid: str) -> bool:
        """Whether the plugin decodes this transaction when it is prepared."""
        refuses = self._callbacks.filter_prepare
        return self._context.two_phase and not (refuses is not None and refuses(self._context, xid, gid))

    def call(self, name: str, *arguments: object) -> list[Output]:
        """Call the callback of this name; return its output."""
        callback = getattr(self._callbacks, name)
        if callback is None:
            if name in _MISSING:
                raise MissingCallbackError(_MISSING[name].format(name), sqlstate="55000")
            return []
        self._context.accept_writes = True
        try:
            callback(self._context, *arguments)
        finally:
            self._context.accept_writes = False
        return self._context.take_written()

"""Calls the callbacks of an output plugin by name.

In: a callback's name and arguments. Out: the callback's output. Raises MissingCallbackError if a required callback
is missing, with the messages and codes of src/backend/replication/logical/logical.c. The errors of the plugin itself
pass through.
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

_STREAMING_MESSAGE = "logical streaming requires a {}_cb callback"
_TWO_PHASE_MESSAGE = "logical replication at prepare time requires a {}_cb callback"

#: Maps a required callback to the error message if it is missing. If any other callback is missing, `call` does nothing.
_MISSING_CALLBACK_MESSAGES = MappingProxyType(
    {
        "stream_start": _STREAMING_MESSAGE,
        "stream_stop": _STREAMING_MESSAGE,
        "stream_abort": _STREAMING_MESSAGE,
        "stream_commit": _STREAMING_MESSAGE,
        "stream_change": _STREAMING_MESSAGE,
        "begin_prepare": _TWO_PHASE_MESSAGE,
        "prepare": _TWO_PHASE_MESSAGE,
        "commit_prepared": _TWO_PHASE_MESSAGE,
        "rollback_prepared": _TWO_PHASE_MESSAGE,
        "stream_prepare": "logical streaming at prepare time requires a {}_cb callback",
    }
)


class LoadedPlugin:
    """An output plugin that has been started, with the context that its callbacks write to."""

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
            is_init = False  # True would mean that the slot is being created.
            self._callbacks.startup(self._context, self._context.options, is_init)

    def shutdown(self) -> None:
        """Call the plugin's shutdown callback, if it has one."""
        if self._callbacks.shutdown is not None:
            self._callbacks.shutdown(self._context)

    @property
    def output_type(self) -> OutputType:
        """Whether the plugin writes text or bytes."""
        return self._context.options.output_type

    @property
    def streaming(self) -> bool:
        """Whether the plugin gets transactions while they are in progress."""
        return self._context.streaming

    def is_origin_filtered(self, origin: str | None) -> bool:
        """Whether the plugin drops transactions of this origin."""
        filter_by_origin = self._callbacks.filter_by_origin
        return filter_by_origin is not None and filter_by_origin(self._context, origin)

    def can_decode_prepare(self, xid: int, gid: str) -> bool:
        """Whether the plugin gets this transaction at PREPARE TRANSACTION, and not only at COMMIT PREPARED."""
        filter_prepare = self._callbacks.filter_prepare
        return self._context.two_phase and not (
            filter_prepare is not None and filter_prepare(self._context, xid, gid)
        )

    def call(self, name: str, *arguments: object) -> list[Output]:
        """Call the callback of this name and return its output."""
        callback = getattr(self._callbacks, name)
        if callback is None:
            if name in _MISSING_CALLBACK_MESSAGES:
                raise MissingCallbackError(_MISSING_CALLBACK_MESSAGES[name].format(name), sqlstate="55000")
            return []
        self._context.can_write = True
        try:
            callback(self._context, *arguments)
        finally:
            self._context.can_write = False
        return self._context.take_output()

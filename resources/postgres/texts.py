r"""Reads texts of the system catalogs exactly, including names that are invalid in the database's encoding.

In: a session within a transaction. Out: a cursor that reads every text, and the set of illegible texts. A
server refuses a whole result if it cannot convert one byte of it, or if one byte of a database in SQL_ASCII is
not valid UTF-8 (PostgreSQL documentation, Character Set Support). So texts are read in the database's own
encoding and decoded here, SQL_ASCII as UTF-8. A byte that is part of no character becomes an escape,
`caf\xe9`.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import adapt, errors

Result = TypeVar("Result")

#: The text types of system catalogs; loaders for them apply to elements of arrays, too.
_TEXTS = ("text", "name", '"char"', "varchar", "bpchar")


class Texts:
    """A cursor that reads texts and records the illegible ones; with `as_bytes` in the database's encoding."""

    def __init__(self, connection: psycopg.Connection[Any], *, as_bytes: bool) -> None:
        if as_bytes:
            connection.execute(
                "select set_config('client_encoding', current_setting('server_encoding'), true)"
            )
        #: The texts with bytes that are part of no character, in their escaped form.
        self.illegible: set[str] = set()
        self.cursor = connection.cursor()
        codec, texts = _codec(connection), self

        class Text(adapt.Loader):
            def load(self, data: adapt.Buffer) -> str:
                return texts._escape(bytes(data).decode(codec, "surrogateescape"))

        class Json(adapt.Loader):
            def load(self, data: adapt.Buffer) -> Any:
                return texts._escape_all(json.loads(bytes(data).decode(codec, "surrogateescape")))

        for name in _TEXTS:
            self.cursor.adapters.register_loader(name, Text)
        self.cursor.adapters.register_loader("json", Json)

    def _escape(self, text: str) -> str:
        """The text with escapes for bytes that are part of no character."""
        if text.isascii():
            return text
        escaped = "".join(
            f"\\x{ord(letter) - 0xDC00:02x}" if 0xDC80 <= ord(letter) <= 0xDCFF else letter for letter in text
        )
        if escaped != text:
            self.illegible.add(escaped)
        return escaped

    def _escape_all(self, value: Any) -> Any:
        match value:
            case str():
                return self._escape(value)
            case list():
                return [self._escape_all(each) for each in value]
        return value


def read_legibly(connection: psycopg.Connection[Any], read: Callable[[bool], Result]) -> Result:
    """The result of `read(as_bytes)`; if the server cannot convert a text, `read` is repeated with True."""
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    try:
        # From all other encodings the server converts texts itself.
        return read(encoding in {"SQL_ASCII", "UTF8"})
    except (errors.UntranslatableCharacter, errors.CharacterNotInRepertoire):
        return read(True)


def _codec(connection: psycopg.Connection[Any]) -> str:
    """Python's codec for a session's texts."""
    try:
        codec = connection.info.encoding
    except errors.NotSupportedError:  # Python does not know this encoding.
        codec = "ascii"
    return "utf-8" if connection.info.parameter_status("client_encoding") == "SQL_ASCII" else codec

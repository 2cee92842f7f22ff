r"""Reads texts of the system catalogs exactly, even names that are invalid in the database's encoding.

If the server cannot convert one byte of a result to the session's encoding, it refuses the whole result. If
the database's encoding is SQL_ASCII, one byte that is not valid UTF-8 has the same effect (PostgreSQL documentation,
Character Set Support). Such texts are read in the database's own encoding and decoded here. Texts of
SQL_ASCII are decoded as UTF-8. A byte that is part of no character becomes an escape, as in `caf\xe9`.

In: a session within a transaction.
Out: a cursor that reads every text, and the set of illegible texts.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import adapt, errors

Result = TypeVar("Result")

#: The types of texts in system catalogs. A loader of such a type also loads the elements of its arrays.
_TEXT_TYPES = ("text", "name", '"char"', "varchar", "bpchar")


class Texts:
    """Has a cursor that reads texts, and records which of them are illegible.

    With `as_bytes` the server sends texts in the database's encoding, and converts nothing.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, as_bytes: bool) -> None:
        if as_bytes:
            connection.execute(
                "select set_config('client_encoding', current_setting('server_encoding'), true)"
            )
        #: The texts with bytes that are part of no character, in their escaped form.
        self.illegible_texts: set[str] = set()
        self.cursor = connection.cursor()
        codec, texts = _find_codec(connection), self

        class Text(adapt.Loader):
            def load(self, data: adapt.Buffer) -> str:
                return texts._escape(bytes(data).decode(codec, "surrogateescape"))

        class Json(adapt.Loader):
            def load(self, data: adapt.Buffer) -> Any:
                return texts._escape_all(json.loads(bytes(data).decode(codec, "surrogateescape")))

        for name in _TEXT_TYPES:
            self.cursor.adapters.register_loader(name, Text)
        self.cursor.adapters.register_loader("json", Json)

    def _escape(self, text: str) -> str:
        """The text, in which bytes that are part of no character are replaced by escapes."""
        if text.isascii():
            return text
        escaped = "".join(
            f"\\x{ord(letter) - 0xDC00:02x}" if 0xDC80 <= ord(letter) <= 0xDCFF else letter for letter in text
        )
        if escaped != text:
            self.illegible_texts.add(escaped)
        return escaped

    def _escape_all(self, value: Any) -> Any:
        """A value of JSON, in which `_escape` was applied to each text."""
        match value:
            case str():
                return self._escape(value)
            case list():
                return [self._escape_all(element) for element in value]
        return value


def read_any_encoding(connection: psycopg.Connection[Any], read: Callable[[bool], Result]) -> Result:
    """Read texts of a database with any encoding, and return the result of `read`.

    The argument of `read` says whether the server shall send texts without converting them. If the server cannot
    convert a text, `read` is called again with True.
    """
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    try:
        # Texts in these two encodings need no conversion. Texts in other encodings are converted by the server.
        return read(encoding in {"SQL_ASCII", "UTF8"})
    except (errors.UntranslatableCharacter, errors.CharacterNotInRepertoire):
        return read(True)


def _find_codec(connection: psycopg.Connection[Any]) -> str:
    """The name of Python's codec for the texts that a session receives."""
    try:
        codec = connection.info.encoding
    except errors.NotSupportedError:  # Python has no codec for this encoding.
        codec = "ascii"
    return "utf-8" if connection.info.parameter_status("client_encoding") == "SQL_ASCII" else codec

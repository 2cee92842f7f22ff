r"""Texts of the system catalogs as the server has them: names that are no text in the database's encoding, among others.

In: a session within a transaction. Out: a cursor that reads every text, and which of them are illegible. A server refuses a whole result for one such
byte where it has to convert it or, in a database in SQL_ASCII, to validate it (section 23.3). So texts are read in the database's own encoding, and
decoded here: those in SQL_ASCII as UTF-8. A byte that is part of no character comes as an escape, `caf\xe9`.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import adapt, errors

Read = TypeVar("Read")

#: Types of texts in system catalogs (section 8.3, and 9.16 for JSON); of their arrays these are the elements.
_TEXTS = ("text", "name", '"char"', "varchar", "bpchar")


class Texts:
    """A cursor that reads texts, `as_bytes` in the encoding of the database, and what of them was illegible."""

    def __init__(self, connection: psycopg.Connection[Any], *, as_bytes: bool) -> None:
        if as_bytes:
            connection.execute(
                "select set_config('client_encoding', current_setting('server_encoding'), true)"
            )
        #: Texts, as they are shown, that had bytes which are part of no character.
        self.illegible: set[str] = set()
        self.cursor = connection.cursor()
        codec, texts = _codec(connection), self

        class Text(adapt.Loader):
            def load(self, data: adapt.Buffer) -> str:
                return texts._legible(bytes(data).decode(codec, "surrogateescape"))

        class Json(adapt.Loader):
            def load(self, data: adapt.Buffer) -> Any:
                return texts._all_legible(json.loads(bytes(data).decode(codec, "surrogateescape")))

        for name in _TEXTS:
            self.cursor.adapters.register_loader(name, Text)
        self.cursor.adapters.register_loader("json", Json)

    def _legible(self, text: str) -> str:
        if text.isascii():
            return text
        escaped = "".join(
            f"\\x{ord(letter) - 0xDC00:02x}" if 0xDC80 <= ord(letter) <= 0xDCFF else letter for letter in text
        )
        if escaped != text:
            self.illegible.add(escaped)
        return escaped

    def _all_legible(self, value: Any) -> Any:
        match value:
            case str():
                return self._legible(value)
            case list():
                return [self._all_legible(each) for each in value]
        return value


def legibly(connection: psycopg.Connection[Any], read: Callable[[bool], Read]) -> Read:
    """What `read` gets, in a transaction of its own, `as_bytes` or not; again where the server cannot convert a text."""
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    try:
        # Of another one the server's conversion is the one that counts; it converts neither of these.
        return read(encoding in {"SQL_ASCII", "UTF8"})
    except (errors.UntranslatableCharacter, errors.CharacterNotInRepertoire):
        return read(True)


def _codec(connection: psycopg.Connection[Any]) -> str:
    """How the texts of a session are decoded."""
    try:
        codec = connection.info.encoding
    except errors.NotSupportedError:  # Python knows no such encoding.
        codec = "ascii"
    return "utf-8" if connection.info.parameter_status("client_encoding") == "SQL_ASCII" else codec

"""Checks values of the configuration: names, connection strings, and options that PostgreSQL has as well.

In: a value of the file
Out: the value that the `Config` gets

An invalid value is refused with a message and a hint. The message does not contain the value, since it may be a
password.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Annotated, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import AfterValidator, SecretStr
from pydantic_core import PydanticCustomError

from pgsieve.decoding.values.quoting import MAX_NAME_BYTES, shorten_name
from pgsieve.pipelines.config.identifiers import parse_qualified_name

#: The greatest length of `capture`, with which the names of the slot's publications begin. Their longest suffix is
#: `_iud_root`.
CAPTURE_BYTES = MAX_NAME_BYTES - len("_iud_root")


def make_slot_name(*parts: str, max_length: int = MAX_NAME_BYTES) -> str:
    """A valid name for a replication slot, made from these parts.

    It consists of a-z, 0-9 and _, as `ReplicationSlotValidateName` requires (`src/backend/replication/slot.c`), and has
    at most `max_length` characters. If the name has to be shortened, it ends with a digest of all parts. Otherwise two
    long names could become the same slot.
    """
    name = re.sub(r"[^a-z0-9_]", "_", "_".join(("pgsieve", *parts)).lower())
    return shorten_name(name, max_length, "_".join(parts))


def make_refusal(message: str, hint: str | None = None) -> PydanticCustomError:
    """Make the error that a validator raises for an invalid value."""
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


def _check_folder_name(name: str) -> str:
    """Refuse a name that cannot be a folder of the lake and a part of a Dagster asset key."""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name.startswith("_") or len(name) > MAX_NAME_BYTES:
        raise make_refusal(
            "cannot be a name",
            f"letters, digits and underscores, no underscore first, {MAX_NAME_BYTES} at most: "
            "it becomes a folder of the lake and part of an asset key",
        )
    return name


def _check_object_name(name: str, max_bytes: int = MAX_NAME_BYTES) -> str:
    if not name or len(name.encode()) > max_bytes:
        raise make_refusal(
            f"should be a name of 1 to {max_bytes} bytes", "write it as it is on the server, unquoted"
        )
    return name


def _check_capture_name(name: str) -> str:
    """Refuse a name that would be too long after a suffix was added to it."""
    return _check_object_name(name, CAPTURE_BYTES)


def _refuse_blank(text: str) -> str:
    if not text.strip():
        raise make_refusal("is empty", "leave the key out for its default")
    return text


def split_name(text: str, part_count: int, example: str) -> tuple[str, ...]:
    """Split a qualified name into this many parts, as SQL does. Refuses other text; the hint shows `example`."""
    try:
        return parse_qualified_name(text, part_count)
    except ValueError as error:
        raise make_refusal(str(error), f"write it as in SQL: {example}") from None


def refuse_empty(entries: Collection[object] | None) -> Collection[object] | None:
    """Refuse an empty list or mapping.

    Pydantic's `min_length` would do the same, but it does not count invalid entries. A list with one invalid entry
    would get two problems instead of one.
    """
    if entries is not None and not entries:
        raise make_refusal("should have at least one entry")
    return entries


def refuse_duplicates(items: Iterable[Hashable], kind: str) -> None:
    """Refuse a list that contains an item twice. `kind` says what the items are, for example "table"."""
    if any(count > 1 for count in Counter(items).values()):
        raise make_refusal(f"names a {kind} twice", "keep one of them")


def refuse_unreadable_conninfo(conninfo: SecretStr) -> SecretStr:
    """Refuse a conninfo that libpq cannot parse. The message shows nothing of the conninfo."""
    try:
        conninfo_to_dict(conninfo.get_secret_value())
    except psycopg.Error:
        # libpq's message quotes a part of the conninfo, and that part may be a password.
        raise make_refusal(
            "is not a connection string that libpq can read",
            "keyword=value pairs, values with spaces in single quotes; or postgresql://user@host/dbname, "
            "with %-codes for special characters; put a password with such characters into the key `password`",
        ) from None
    return conninfo


def has_password(conninfo: SecretStr) -> bool:
    """True if a conninfo contains a password."""
    return bool(conninfo_to_dict(conninfo.get_secret_value()).get("password"))


def refuse_empty_secret(secret: SecretStr) -> SecretStr:
    """Refuse an empty secret."""
    if not secret.get_secret_value():
        raise make_refusal("is empty", "leave the key out for its default")
    return secret


def refuse_empty_password(password: SecretStr) -> SecretStr:
    """Refuse an empty password. libpq would silently use the one of PGPASSWORD or .pgpass instead."""
    if not password.get_secret_value():
        raise make_refusal(
            "is empty", "leave the key out if there is no password, or to use that of PGPASSWORD or .pgpass"
        )
    return password


def refuse_empty_command(command: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """Refuse a command that does not begin with the name of a program."""
    if not command or not command[0].get_secret_value():
        raise make_refusal(
            "names no program", "a list: the program, then its arguments one by one; no shell reads them"
        )
    return command


def _check_column_name(text: str) -> str:
    split_name(text, 3, 'public.orders.amount, "Sales".lines."Unit Price"')
    return text


def convert_to_lower_case(value: object) -> object:
    """Convert the value of an option to lower case, because PostgreSQL ignores the case of its value."""
    return value.lower() if isinstance(value, str) else value


def normalise_streaming(value: object) -> object:
    """Convert a boolean value of `streaming` to `on` or `off`.

    The same values count as booleans as in `defGetStreamingMode` (`src/backend/commands/subscriptioncmds.c`).
    """
    modes_by_boolean = {"true": "on", "false": "off", "yes": "on", "no": "off", "1": "on", "0": "off"}
    text = str(value).lower() if isinstance(value, str | bool) else value
    return modes_by_boolean.get(text, text) if isinstance(text, str) else text


def convert_false_to_off(value: object) -> object:
    """Convert False to `off`. A `Config` that is made in Python may have False for an option that may be `off`."""
    return "off" if value is False else value


def add_names(entries: object) -> object:
    """Add the key of each entry to the entry, as its field `name`."""
    if not isinstance(entries, Mapping):
        return entries
    return {
        name: {**entry, "name": name} if isinstance(entry, Mapping) else entry
        for name, entry in entries.items()
    }


def _check_plain_name(name: str) -> str:
    """Refuse a name for a column that some query engine would have to quote or to map to another name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > MAX_NAME_BYTES:
        raise make_refusal(
            "cannot be the name of a column", f"letters, digits and underscores, {MAX_NAME_BYTES} at most"
        )
    return name


#: The kinds of metadata that a replica may have as columns.
MetadataKind = Literal[
    "commit_lsn",
    "commit_time",
    "ordinal",
    "operation",
    "source_table",
    "applied_at",
    "copy_lsn",
    "copy_time",
    "deleted",
    "filtered",
    "deleted_at",
]
PlainName = Annotated[str, AfterValidator(_check_plain_name)]
FolderName = Annotated[str, AfterValidator(_check_folder_name)]
ObjectName = Annotated[str, AfterValidator(_check_object_name)]
CaptureName = Annotated[str, AfterValidator(_check_capture_name)]
ColumnName = Annotated[str, AfterValidator(_check_column_name)]
NonEmptyText = Annotated[str, AfterValidator(_refuse_blank)]

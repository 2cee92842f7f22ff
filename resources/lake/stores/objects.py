"""Reads and writes the objects of an object store, as a whole or in parts. Can create an object only if it is new.

In: the path of a lake, and delta-rs's options for the lake's store.
Out: bytes.

After a transient error, a request is repeated. Raises FileExistsError, and OSError with the store's message, which
`store_errors` interprets. The requests are made by obstore, the Python package of the library object_store. delta-rs
uses object_store, too. Instances of the classes in this module cannot be sent to executors.

A conditional PUT creates an object only if no object of its name exists. The store may create the object, and its
answer may get lost. The PUT is then repeated, and the store refuses it, because the object exists. So `create`
reads the object that exists: if it has the same bytes, the first PUT was successful. This conclusion is right only
if no other writer creates an object with the same bytes, so the bytes must be unique.

https://docs.rs/object_store/latest/object_store/enum.PutMode.html (Create)
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
from tenacity import retry, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from pgsieve.resources.lake.stores.aws_profile import AwsProfile
from pgsieve.resources.lake.stores.storage import PLATFORM_BY_SCHEME, Storage
from pgsieve.resources.lake.stores.store_errors import find_store_refusal

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_LOGGER = logging.getLogger(__name__)

#: How many bytes are read when a file is opened. If the file is smaller, it is read as a whole.
FIRST_BYTES = 1024 * 1024
#: The size of the parts in which an object is written, and the number of parts that are in memory and are written at the
#: same time. An object that is smaller than a part takes one request.
PART_BYTES, _PARALLEL_PARTS = 10 * 1024 * 1024, 4
#: Distinguishes objects that have had the same name: tag, time of the last change, and size in bytes.
Stamp = tuple[str | None, datetime, int]

#: The answer of a store if an object has no bytes at the requested position (RFC 9110, 416 Range Not Satisfiable).
_RANGE_NOT_SATISFIABLE = "416 Range Not Satisfiable"
#: An option of delta-rs. obstore has a separate parameter for it.
_ALLOW_HTTP = "aws_allow_http"
#: The messages of the library (object_store) end with data structures, which begin with this text.
_STRUCTURES = "\n\nDebug source:"


def is_transient(error: BaseException) -> bool:
    """True if a store has refused a request by a transient error."""
    refusal = find_store_refusal([error])
    return refusal is not None and refusal.is_transient


#: Repeats a conditional PUT after a transient error. The library does not repeat it itself.
_retry_creation = retry(
    retry=retry_if_exception(is_transient),
    wait=wait_random_exponential(0.1, max=5),
    stop=stop_after_attempt(4) | stop_after_delay(60),
    reraise=True,
)


def open_objects(path: str, options: tuple[tuple[str, str], ...]) -> "Objects | None":
    """The objects of the store that contains a path.

    None if the path is not on an object store, or if only delta-rs has credentials for the store.
    """
    if Storage.from_address(path).platform is None or not has_same_credentials(path, dict(options)):
        return None
    parts = urlsplit(path)
    try:
        return _share_objects(f"{parts.scheme}://{parts.netloc}", options)
    except OSError as error:
        _LOGGER.debug("%s: %s", path, error)
        return None


class Objects:
    """The objects of one bucket or container."""

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        with _translate_to_os_errors():
            self._store = _open_store(root, options)

    def read(self, path: str) -> bytes | None:
        """The bytes of an object. None if it does not exist."""
        import obstore

        try:
            with _translate_to_os_errors():
                return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return None

    def read_beginning(self, path: str, size: int = FIRST_BYTES) -> tuple[bytes, int]:
        """The first `size` bytes of an object, and its total size. Raises FileNotFoundError."""
        import obstore

        try:
            with _translate_to_os_errors():
                answer = obstore.get(self._store, path, options={"range": (0, size)})
                return bytes(answer.bytes()), answer.meta["size"]
        except OSError as error:
            if _RANGE_NOT_SATISFIABLE in str(error):
                return b"", 0  # The object is empty.
            raise

    def read_part(self, path: str, start: int, end: int) -> bytes:
        """The bytes of an object from position `start` to position `end`, without the byte at `end`.

        Raises FileNotFoundError.
        """
        import obstore

        with _translate_to_os_errors():
            return bytes(obstore.get_range(self._store, path, start=start, end=end))

    def open_writer(self, path: str) -> "ObjectWriter":
        """A writer that writes an object from its beginning to its end. Up to `PART_BYTES` are written by one request."""
        return ObjectWriter(self._store, path)

    def write(self, path: str, content: bytes) -> None:
        """Write an object. It replaces an older object of this name."""
        import obstore

        with _translate_to_os_errors():
            obstore.put(self._store, path, content)

    def list_stamps(self, folder: str, after_name: str | None = None) -> dict[str, Stamp]:
        """Maps the names of the objects in a folder to their stamps. Objects in subfolders are left out.

        If `after_name` is given, only names after this name are listed.
        """
        import obstore

        prefix = f"{folder.strip('/')}/"
        with _translate_to_os_errors():
            batches = obstore.list(
                self._store, prefix, offset=None if after_name is None else prefix + after_name
            )
            object_metas = [meta for batch in batches for meta in batch]
        # Compare the depth of the path, and not its beginning: the library may write the path in another form.
        depth = prefix.count("/")
        return {
            meta["path"].rpartition("/")[2]: _make_stamp(meta)
            for meta in object_metas
            if meta["path"].count("/") == depth
        }

    def read_stamp(self, path: str) -> Stamp | None:
        """The stamp of an object. None if it does not exist."""
        import obstore

        try:
            with _translate_to_os_errors():
                return _make_stamp(obstore.head(self._store, path))
        except FileNotFoundError:
            return None

    @_retry_creation
    def create(self, path: str, content: bytes) -> None:
        """Create an object with unique bytes. Raises FileExistsError if another object has this name."""
        import obstore

        try:
            obstore.put(self._store, path, content, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            if self.read(path) != content:
                raise FileExistsError(path) from None
        except obstore.exceptions.BaseError as error:
            # The store may have created the object although it answered with an error.
            if not self._has_content(path, content):
                raise OSError(_format_message(error)) from error

    def _has_content(self, path: str, content: bytes) -> bool:
        """True if the object exists and has these bytes. Raises FileExistsError if it has other bytes."""
        try:
            existing_content = self.read(path)
        except OSError:
            return False
        if existing_content not in {None, content}:
            raise FileExistsError(path)
        return existing_content is not None


class ObjectWriter:
    """Writes an object in parts, several at the same time. pyarrow uses it as a file. `close` creates the object."""

    closed = False

    def __init__(self, store: "ObjectStore", path: str) -> None:
        import obstore

        self._file = obstore.open_writer(store, path, buffer_size=PART_BYTES, max_concurrency=_PARALLEL_PARTS)

    def write(self, content: bytes | pa.Buffer) -> int:
        """Add bytes. Return their number."""
        with _translate_to_os_errors():
            # The bytes of pyarrow's buffers are signed, which the library refuses, so make them unsigned.
            return self._file.write(memoryview(content).cast("B"))

    def flush(self) -> None:
        """Do nothing. Bytes may be kept in memory until `close`."""

    def close(self) -> None:
        """Create the object from the bytes that were written."""
        self.closed = True
        with _translate_to_os_errors():
            self._file.close()


def has_same_credentials(
    path: str, options: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> bool:
    """True if the library has the same credentials as delta-rs.

    Without an endpoint in the options, delta-rs also uses the credentials of AWS profiles. The library does not read
    profiles.
    """
    environ = os.environ if environ is None else environ
    if PLATFORM_BY_SCHEME.get(urlsplit(path).scheme) != "s3" or environ.get("AWS_ACCESS_KEY_ID"):
        return True
    if {"aws_access_key_id", "aws_endpoint_url"} & _convert_names_to_lower_case(options).keys():
        return True
    return not AwsProfile.read_active(environ).has_credentials


@cache
def _share_objects(root: str, options: tuple[tuple[str, str], ...]) -> Objects:
    """The objects of a store with these options. All users in this process share one instance, and its connections."""
    return Objects(root, dict(options))


def _open_store(root: str, options: Mapping[str, str]) -> "ObjectStore":
    """Open a store. `root` is the address of a bucket or container."""
    from obstore.store import S3Store, from_url

    # The types are Any, because the library's annotations require typed dictionaries.
    config: Any = _convert_names_to_lower_case(options)
    client: Any = {"allow_http": config.pop(_ALLOW_HTTP) == "true"} if _ALLOW_HTTP in config else {}
    if PLATFORM_BY_SCHEME.get((parts := urlsplit(root)).scheme) == "s3":
        # from_url would ignore the option for the endpoint, and use the environment variable instead.
        return S3Store(parts.netloc, config=config, client_options=client)
    return from_url(root, config=config, client_options=client)


def _make_stamp(meta: "ObjectMeta") -> Stamp:
    return meta["e_tag"], meta["last_modified"], meta["size"]


def _convert_names_to_lower_case(options: Mapping[str, str]) -> dict[str, str]:
    """The options with their names in lower case. delta-rs ignores the case of the names."""
    return {name.lower(): value for name, value in options.items()}


@contextmanager
def _translate_to_os_errors() -> Iterator[None]:
    """Raise the errors of the library as FileNotFoundError or OSError, without the data structures in their messages."""
    import obstore

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_format_message(error)) from error
    except obstore.exceptions.BaseError as error:
        raise OSError(_format_message(error)) from error


def _format_message(error: Exception) -> str:
    """The message of an error of the library, without the data structures at its end."""
    return str(error).partition(_STRUCTURES)[0]

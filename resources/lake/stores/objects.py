"""Reads and writes objects of a store, as a whole or in parts, and creates objects at most once.

In: a lake's path, and delta-rs's options for its store. Out: bytes. Transient errors are repeated. Raises OSError
with the store's message, which `store_errors` interprets, and FileExistsError. delta-rs uses the same library,
object_store. Instances of this module's classes cannot be sent to executors.

The answer to a conditional PUT may be lost after the store has created the object. Then the store refuses the
repeated PUT, because the object exists. So `create` reads the existing object: if it has the same bytes, the
first PUT has succeeded. This is certain only if the bytes that `create` gets are unique.

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
from pgsieve.resources.lake.stores.storage import SCHEMES, Storage
from pgsieve.resources.lake.stores.store_errors import store_refusal

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_LOGGER = logging.getLogger(__name__)

#: How many bytes are read when a file is opened; a smaller file is read whole.
FIRST_BYTES = 1024 * 1024
#: The size of the parts in which an object is written, and how many parts are written at a time, from memory. A
#: smaller object takes one request.
PART_BYTES, _PARALLEL_PARTS = 10 * 1024 * 1024, 4
#: Distinguishes objects of the same name: tag, time and size in bytes.
Stamp = tuple[str | None, datetime, int]

#: A store's answer if an object has no bytes at the requested position (RFC 9110, 416 Range Not Satisfiable).
_RANGE_NOT_SATISFIABLE = "416 Range Not Satisfiable"
#: An option of delta-rs, which this library takes separately.
_ALLOW_HTTP = "aws_allow_http"
#: The beginning of the data structures at the end of the library's messages.
_STRUCTURES = "\n\nDebug source:"


def is_transient(error: BaseException) -> bool:
    """Whether a store's refusal is transient."""
    refusal = store_refusal([error])
    return refusal is not None and refusal.is_transient


#: Repeats a conditional PUT after a transient error; the library itself does not.
_retry_creation = retry(
    retry=retry_if_exception(is_transient),
    wait=wait_random_exponential(0.1, max=5),
    stop=stop_after_attempt(4) | stop_after_delay(60),
    reraise=True,
)


def objects_at(path: str, options: tuple[tuple[str, str], ...]) -> "Objects | None":
    """The objects of a path's store; None if the path is on no store, or only delta-rs has credentials for it."""
    if Storage.of(path).platform is None or not has_credentials(path, dict(options)):
        return None
    parts = urlsplit(path)
    try:
        return _shared_objects(f"{parts.scheme}://{parts.netloc}", options)
    except OSError as error:
        _LOGGER.debug("%s: %s", path, error)
        return None


class Objects:
    """The objects of one bucket or container."""

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        with _os_errors():
            self._store = _open_store(root, options)

    def read(self, path: str) -> bytes | None:
        """The bytes of an object; None if it does not exist."""
        import obstore

        try:
            with _os_errors():
                return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return None

    def beginning(self, path: str, size: int = FIRST_BYTES) -> tuple[bytes, int]:
        """The first `size` bytes of an object, and its total size; raises FileNotFoundError."""
        import obstore

        try:
            with _os_errors():
                answer = obstore.get(self._store, path, options={"range": (0, size)})
                return bytes(answer.bytes()), answer.meta["size"]
        except OSError as error:
            if _RANGE_NOT_SATISFIABLE in str(error):
                return b"", 0  # The object is empty.
            raise

    def part(self, path: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` up to, but without, `end`; raises FileNotFoundError."""
        import obstore

        with _os_errors():
            return bytes(obstore.get_range(self._store, path, start=start, end=end))

    def writer(self, path: str) -> "ObjectWriter":
        """A sequential writer of an object. Up to `PART_BYTES` are written by one request."""
        return ObjectWriter(self._store, path)

    def write(self, path: str, content: bytes) -> None:
        """Write an object; replace an older one."""
        import obstore

        with _os_errors():
            obstore.put(self._store, path, content)

    def stamps(self, folder: str, after: str | None = None) -> dict[str, Stamp]:
        """The stamps of the objects in a folder by name, without subfolders; only of names after `after`, if given."""
        import obstore

        prefix = f"{folder.strip('/')}/"
        with _os_errors():
            batches = obstore.list(self._store, prefix, offset=None if after is None else prefix + after)
            object_metas = [meta for batch in batches for meta in batch]
        # The depth is compared, not the prefix: the library may return a path in another form than requested.
        depth = prefix.count("/")
        return {
            meta["path"].rpartition("/")[2]: _stamp(meta)
            for meta in object_metas
            if meta["path"].count("/") == depth
        }

    def stamp(self, path: str) -> Stamp | None:
        """The stamp of an object; None if it does not exist."""
        import obstore

        try:
            with _os_errors():
                return _stamp(obstore.head(self._store, path))
        except FileNotFoundError:
            return None

    @_retry_creation
    def create(self, path: str, content: bytes) -> None:
        """Create an object with unique bytes; raise FileExistsError if another object has the name."""
        import obstore

        try:
            obstore.put(self._store, path, content, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            if self.read(path) != content:
                raise FileExistsError(path) from None
        except obstore.exceptions.BaseError as error:
            # The store may have created the object nevertheless.
            if not self._has_content(path, content):
                raise OSError(_message(error)) from error

    def _has_content(self, path: str, content: bytes) -> bool:
        """Whether the object exists with these bytes; raises FileExistsError if it has others."""
        try:
            existing = self.read(path)
        except OSError:
            return False
        if existing not in {None, content}:
            raise FileExistsError(path)
        return existing is not None


class ObjectWriter:
    """Writes an object in concurrent parts, as a file for pyarrow. `close` creates the object."""

    closed = False

    def __init__(self, store: "ObjectStore", path: str) -> None:
        import obstore

        self._file = obstore.open_writer(store, path, buffer_size=PART_BYTES, max_concurrency=_PARALLEL_PARTS)

    def write(self, content: bytes | pa.Buffer) -> int:
        """Add bytes; return their number."""
        with _os_errors():
            # The library refuses the signed bytes of pyarrow's buffers.
            return self._file.write(memoryview(content).cast("B"))

    def flush(self) -> None:
        """Do nothing: bytes may wait until `close`."""

    def close(self) -> None:
        """Create the object from the written bytes."""
        self.closed = True
        with _os_errors():
            self._file.close()


def has_credentials(path: str, options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the library has the credentials that delta-rs has.

    Only delta-rs reads AWS profiles and requests their credentials, and only without an endpoint.
    """
    if SCHEMES.get(urlsplit(path).scheme) != "s3" or environ.get("AWS_ACCESS_KEY_ID"):
        return True
    if {"aws_access_key_id", "aws_endpoint_url"} & _lower_names(options).keys():
        return True
    return not AwsProfile.active(environ).has_credentials


@cache
def _shared_objects(root: str, options: tuple[tuple[str, str], ...]) -> Objects:
    """The objects of a store with these options; this process shares the connections."""
    return Objects(root, dict(options))


def _open_store(root: str, options: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import S3Store, from_url

    # The library's annotations are typed dictionaries.
    config: Any = _lower_names(options)
    client: Any = {"allow_http": config.pop(_ALLOW_HTTP) == "true"} if _ALLOW_HTTP in config else {}
    if SCHEMES.get((parts := urlsplit(root)).scheme) == "s3":
        # from_url would ignore the endpoint option that takes precedence over the environment's.
        return S3Store(parts.netloc, config=config, client_options=client)
    return from_url(root, config=config, client_options=client)


def _stamp(meta: "ObjectMeta") -> Stamp:
    return meta["e_tag"], meta["last_modified"], meta["size"]


def _lower_names(options: Mapping[str, str]) -> dict[str, str]:
    """The options with names in lower case; delta-rs ignores the case."""
    return {name.lower(): value for name, value in options.items()}


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise the library's errors as FileNotFoundError or OSError, without data structures in the message."""
    import obstore

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_message(error)) from error
    except obstore.exceptions.BaseError as error:
        raise OSError(_message(error)) from error


def _message(error: Exception) -> str:
    return str(error).partition(_STRUCTURES)[0]

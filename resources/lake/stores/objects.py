"""Objects of a store, read and written as a whole or in parts; and one that is made once or not at all.

In: where a lake's store is, and delta-rs' options for it; the library is the one that delta-rs reaches stores by, too. Out: bytes.
What a store refuses for a moment is asked again. Raises OSError in the store's words, which `store_errors` understands, and
FileExistsError. Executors have no use for it, and are not sent it.

The answer to a PUT may be lost after the store has the object. A second one would be refused by the first, so what has the name is
read: it is this object where it has the same bytes. Whoever makes an object once gives it bytes that nobody else has.

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

#: So much is read of a file as it is opened: small ones are read whole rather than where they are asked for.
FIRST_BYTES = 1024 * 1024
#: An object is written in parts of so many bytes, each of which is held until the store has it; a smaller one at once.
PART_BYTES, _PARTS_AT_A_TIME = 10 * 1024 * 1024, 4
#: What tells an object from another one of its name: its tag, when it was written, its bytes.
Stamp = tuple[str | None, datetime, int]

#: What a store answers that has no bytes from the place on that was asked for (RFC 9110, section 15.5.17).
_NO_RANGE = "416 Range Not Satisfiable"
#: What delta-rs takes among its options, and this library apart from them.
_ALLOW_HTTP = "aws_allow_http"
#: The library adds its structures to a message, line by line.
_STRUCTURES = "\n\nDebug source:"


def passes(error: BaseException) -> bool:
    """Whether a store refused for a moment only."""
    refused = store_refusal([error])
    return refused is not None and refused.passes


#: Beyond what the library asks again by itself: a PUT with a condition that was cut off.
_again = retry(
    retry=retry_if_exception(passes),
    wait=wait_random_exponential(0.1, max=5),
    stop=stop_after_attempt(4) | stop_after_delay(60),
    reraise=True,
)


def objects_at(path: str, options: tuple[tuple[str, str], ...]) -> "Objects | None":
    """The objects of the store that a path is on; None where it is on none, or they are not reached as delta-rs reaches them."""
    if Storage.of(path).platform is None or not has_credentials(path, dict(options)):
        return None
    parts = urlsplit(path)
    try:
        return _shared(f"{parts.scheme}://{parts.netloc}", options)
    except OSError as error:
        _LOGGER.debug("%s: %s", path, error)
        return None


class Objects:
    """The objects of one bucket or container."""

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        with _os_errors():
            self._store = _opened(root, options)

    def read(self, path: str) -> bytes | None:
        """The bytes of an object; None where there is none."""
        import obstore

        try:
            with _os_errors():
                return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return None

    def beginning(self, path: str, size: int = FIRST_BYTES) -> tuple[bytes, int]:
        """The first bytes of an object, so many or all, and how many it has. Raises FileNotFoundError."""
        import obstore

        try:
            with _os_errors():
                answer = obstore.get(self._store, path, options={"range": (0, size)})
                return bytes(answer.bytes()), answer.meta["size"]
        except OSError as error:
            if _NO_RANGE in str(error):
                return b"", 0  # An empty object has none.
            raise

    def part(self, path: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` up to before `end`. Raises FileNotFoundError."""
        import obstore

        with _os_errors():
            return bytes(obstore.get_range(self._store, path, start=start, end=end))

    def writer(self, path: str) -> "ObjectWriter":
        """What writes an object from the beginning to the end; up to `PART_BYTES` in one request."""
        return ObjectWriter(self._store, path)

    def write(self, path: str, content: bytes) -> None:
        """Write an object, or write it anew."""
        import obstore

        with _os_errors():
            obstore.put(self._store, path, content)

    def stamps(self, folder: str, after: str | None = None) -> dict[str, Stamp]:
        """The objects in a folder by their names there, those below its folders left out; `after` one in the order of names."""
        import obstore

        prefix = f"{folder.strip('/')}/"
        with _os_errors():
            batches = obstore.list(self._store, prefix, offset=None if after is None else prefix + after)
            listed = [meta for batch in batches for meta in batch]
        # By their depth: the library may write a name in another way than it was asked for.
        depth = prefix.count("/")
        return {
            meta["path"].rpartition("/")[2]: _stamp(meta)
            for meta in listed
            if meta["path"].count("/") == depth
        }

    def stamp(self, path: str) -> Stamp | None:
        """What tells an object from another one of its name; None where there is none."""
        import obstore

        try:
            with _os_errors():
                return _stamp(obstore.head(self._store, path))
        except FileNotFoundError:
            return None

    @_again
    def make(self, path: str, content: bytes) -> None:
        """Make an object whose bytes nobody else writes; raises FileExistsError where another one has its name."""
        import obstore

        try:
            obstore.put(self._store, path, content, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            if self.read(path) != content:
                raise FileExistsError(path) from None
        except obstore.exceptions.BaseError as error:
            # It may be there all the same.
            if not self._is_made(path, content):
                raise OSError(_words(error)) from error

    def _is_made(self, path: str, content: bytes) -> bool:
        """Whether the object is there and is this one; raises FileExistsError where it is another's."""
        try:
            there = self.read(path)
        except OSError:
            return False
        if there not in {None, content}:
            raise FileExistsError(path)
        return there is not None


class ObjectWriter:
    """Writes an object in parts, several of which are under way at a time; it is there once it is closed. A file as pyarrow takes one."""

    closed = False

    def __init__(self, store: "ObjectStore", path: str) -> None:
        import obstore

        self._file = obstore.open_writer(
            store, path, buffer_size=PART_BYTES, max_concurrency=_PARTS_AT_A_TIME
        )

    def write(self, content: bytes | pa.Buffer) -> int:
        """Add bytes; how many."""
        with _os_errors():
            # Of signed bytes, as which pyarrow hands its buffers out, the library takes none.
            return self._file.write(memoryview(content).cast("B"))

    def flush(self) -> None:
        """What is written may wait until the end."""

    def close(self) -> None:
        """Have the object made of what was written."""
        self.closed = True
        with _os_errors():
            self._file.close()


def has_credentials(path: str, options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the library finds the credentials that delta-rs does: not what a profile of AWS' tools leaves it to ask for.

    Delta-rs looks there where no endpoint is given.
    """
    if SCHEMES.get(urlsplit(path).scheme) != "s3" or environ.get("AWS_ACCESS_KEY_ID"):
        return True
    if {"aws_access_key_id", "aws_endpoint_url"} & _lower(options).keys():
        return True
    return not AwsProfile.of(environ).has_credentials


@cache
def _shared(root: str, options: tuple[tuple[str, str], ...]) -> Objects:
    """One for all of this process that reach a store by the same options: it has connections of its own."""
    return Objects(root, dict(options))


def _opened(root: str, options: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import S3Store, from_url

    # The library has typed dictionaries for what comes here from a configuration.
    config: Any = _lower(options)
    client: Any = {"allow_http": config.pop(_ALLOW_HTTP) == "true"} if _ALLOW_HTTP in config else {}
    if SCHEMES.get((parts := urlsplit(root)).scheme) == "s3":
        # By its address it would not be told an endpoint that goes before the environment's.
        return S3Store(parts.netloc, config=config, client_options=client)
    return from_url(root, config=config, client_options=client)


def _stamp(meta: "ObjectMeta") -> Stamp:
    return meta["e_tag"], meta["last_modified"], meta["size"]


def _lower(options: Mapping[str, str]) -> dict[str, str]:
    """Options by their names in lower case; delta-rs does not mind."""
    return {name.lower(): value for name, value in options.items()}


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what the library says without its structures: FileNotFoundError, or OSError."""
    import obstore

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(_words(error)) from error
    except obstore.exceptions.BaseError as error:
        raise OSError(_words(error)) from error


def _words(error: Exception) -> str:
    return str(error).partition(_STRUCTURES)[0]

"""Refusals of a whole store are distinguished from errors of one table, and say what to do. No JVM."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.errors import LakeUnavailableError, StoreUnavailableError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import Storage
from pgsieve.resources.lake.stores.store_errors import StoreFault, find_store_refusal
from tests.fixtures.lakes import no_session
from tests.fixtures.s3_proxy import DENIED, EXPIRED, NO_BUCKET, OTHER_REGION, Answer, S3Proxy, s3_proxy
from tests.fixtures.s3_server import SECRET, S3Server

ROWS = pa.table({"id": [1]})


@pytest.fixture(scope="module")
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server.url) as made:
        yield made


def lake_at(address: str, options: dict[str, str]) -> Lake:
    storage = Storage.from_address(address, options)
    return Lake(storage.address, no_session, storage=storage)


@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        (EXPIRED, "the store does not accept the credentials (ExpiredToken)", "renew them"),
        (DENIED, "the store does not allow it (AccessDenied)", "need the right"),
        (NO_BUCKET, "there is no such bucket or container (NoSuchBucket)", "create it"),
        (OTHER_REGION, "the bucket is in another region (AuthorizationHeaderMalformed)", "`region`"),
        (Answer(301, "PermanentRedirect"), "the bucket is in another region", "`region`"),
    ],
    ids=lambda each: each.code if isinstance(each, Answer) else "",
)
def test_a_refusal_names_the_lake_the_stores_code_and_the_way_out(
    s3_server: S3Server, proxy: S3Proxy, s3_folder: str, answer: Answer, what: str, hint: str
) -> None:
    lake = lake_at(s3_folder, {**s3_server.storage, "endpoint": proxy.url})
    path = f"{lake.uri}/t"
    proxy.heal()
    lake.records.append(path, ROWS)
    # A missing bucket refuses every request.
    for part in ("",) if answer in {NO_BUCKET, OTHER_REGION} or answer.status == 301 else ("", "_delta_log/"):
        proxy.refuse(answer, part=part)
        for act in (lambda: lake.records.append(path, ROWS), lambda: lake.records.head(path)):
            with pytest.raises(LakeUnavailableError) as refused:
                act()
            assert refused.value.message == f'lake "{lake.uri}": {what}'
            assert hint in str(refused.value.hint)
            assert not isinstance(refused.value, StoreUnavailableError), "this error is not temporary"
    proxy.heal()
    assert lake.records.count_rows(path) == 1


def test_credentials_that_expire_at_a_head_request_set_no_table_aside(
    s3_server: S3Server, proxy: S3Proxy, s3_folder: str
) -> None:
    lake = lake_at(s3_folder, {**s3_server.storage, "endpoint": proxy.url})
    proxy.heal()
    lake.store.touch(path := f"{lake.uri}/t/x")
    proxy.refuse(EXPIRED, methods="HEAD")
    with pytest.raises(LakeUnavailableError) as refused, lake.access.translate_errors(f"{lake.uri}/t"):
        lake.store.read_stamp(path)
    assert refused.value.message == f'lake "{lake.uri}": the store does not accept the credentials (HTTP 400)'
    assert not isinstance(refused.value, StoreUnavailableError), "this error is not temporary"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"access_key_id": "AKNOBODYS"}, StoreFault.CREDENTIALS),
        ({"secret_access_key": "x" * 24}, StoreFault.CREDENTIALS),
        ({"bucket": "another"}, StoreFault.NO_BUCKET),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_server_refuses_wrong_keys_and_buckets(
    s3_server: S3Server, s3_folder: str, changed: dict[str, str], fault: StoreFault
) -> None:
    address = s3_folder.replace("lake", changed.pop("bucket", "lake"), 1)
    lake = lake_at(address, {**s3_server.storage, **changed})
    with pytest.raises(LakeUnavailableError) as refused:
        lake.records.append(f"{lake.uri}/t", ROWS)
    assert fault.value in refused.value.message
    assert lake.uri in refused.value.message
    assert SECRET not in str(refused.value)


_S3A = (
    "java.nio.file.AccessDeniedException: s3a://lake/t/_delta_log: getFileStatus on s3a://lake/t/_delta_log:"
    " software.amazon.awssdk.services.s3.model.S3Exception: so it is (Service: S3, Status Code: {}, Request ID: 1) (SDK"
    " Attempt Count: 1):{}"
)


@pytest.mark.parametrize(
    ("text", "fault", "passes"),
    [
        (_S3A.format(403, "InvalidAccessKeyId"), StoreFault.CREDENTIALS, False),
        (_S3A.format(403, "AccessDenied"), StoreFault.DENIED, False),
        (_S3A.format(403, "null"), StoreFault.DENIED, False),
        (_S3A.format(400, "ExpiredToken"), StoreFault.CREDENTIALS, False),
        (_S3A.format(400, "null"), StoreFault.CREDENTIALS, False),
        (_S3A.format(400, "400 Bad Request: null"), StoreFault.CREDENTIALS, False),
        (
            (
                "Generic S3 error: Error performing HEAD http://h/lake/x in 1.1ms - Server returned non-2xx status code: 400 Bad"
                " Request: "
            ),
            StoreFault.CREDENTIALS,
            False,
        ),
        (
            (
                "Kernel error -> Generic S3 error\n \x1b[31m↳\x1b[0m Error performing HEAD http://h/lake/x in 1ms - Server returned"
                " non-2xx status code\n \x1b[31m↳\x1b[0m 400 Bad Request\n"
            ),
            StoreFault.CREDENTIALS,
            False,
        ),
        (_S3A.format(503, "SlowDown"), StoreFault.BUSY, True),
        (
            "org.apache.hadoop.fs.s3a.UnknownStoreException: `s3a://none/': Bucket",
            StoreFault.NO_BUCKET,
            False,
        ),
        (
            (
                "java.net.ConnectException: Call to lake failed: software.amazon.awssdk.core.exception.SdkClientException:"
                " Unable to execute HTTP request: Connection refused"
            ),
            StoreFault.UNREACHED,
            True,
        ),
        (
            "Generic S3 error\n \x1b[31m↳\x1b[0m Error performing PUT http://169.254.169.254/latest/api/token in 1s",
            StoreFault.NO_CREDENTIALS,
            False,
        ),
        (
            (
                "Generic S3 error: Error performing GET http://h/lake in 3.2s, after 10 retries, max_retries: 10 - HTTP error:"
                " error sending request"
            ),
            StoreFault.UNREACHED,
            True,
        ),
        (
            (
                "Generic S3 error\n \x1b[31m↳\x1b[0m Error performing GET http://h/lake in 3.2s - Server returned non-2xx status"
                " code\n \x1b[31m↳\x1b[0m 503 Service Unavailable"
            ),
            StoreFault.BUSY,
            True,
        ),
    ],
)
def test_error_texts_of_engines_are_understood(text: str, fault: StoreFault, passes: bool) -> None:
    refused = find_store_refusal([RuntimeError("it failed"), RuntimeError(text)])
    assert refused is not None
    assert (refused.fault, refused.is_transient) == (fault, passes)


@pytest.mark.parametrize(
    "text",
    [
        "Object at location lake/t/part-0.parquet not found: Error performing GET http://h - 404 <Code>NoSuchKey</Code>",
        "Generic S3 error: Error performing PUT http://h/x in 1ms - Server returned non-2xx status code: 400 Bad Request: <Code>EntityTooSmall</Code>",
        "connection to server at 127.0.0.1 failed: Connection refused",
        "[CAST_INVALID_INPUT] 'Error performing GET <Code>NoSuchBucket</Code>' cannot be cast. SQLSTATE: 22018",
    ],
)
def test_errors_of_a_missing_object_a_publisher_and_a_cell_are_not_the_stores(text: str) -> None:
    assert find_store_refusal([RuntimeError(text)]) is None

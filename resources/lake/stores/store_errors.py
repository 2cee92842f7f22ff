"""Interprets the refusals of an object store: the reason, the remedy, and whether the fault is transient.

In: errors of delta-rs and of Spark's file systems. They contain the store's answer.
Out: a `StoreRefusal`. None if the error concerns one table, or does not come from the store.

A refusal shows only the code of the store's answer. The rest contains paths, requests and signed data. Raises nothing.

https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
https://learn.microsoft.com/en-us/rest/api/storageservices/blob-service-error-codes
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class StoreFault(Enum):
    """The reason why a store has refused a request."""

    NO_BUCKET = "there is no such bucket or container"
    CREDENTIALS = "the store does not accept the credentials"
    NO_CREDENTIALS = "there are no credentials for the store"
    DENIED = "the store does not allow it"
    REGION = "the bucket is in another region"
    BUSY = "the store answers with errors"
    UNREACHED = "the store does not answer"
    NO_FILE_SYSTEM = "Spark has no file system for this address"


_RUN_AGAIN = "then run again: nothing is lost, a slot is confirmed only up to what the lake holds"
_HINT_BY_FAULT = {
    StoreFault.NO_BUCKET: f"create it, or correct `lake` in pgsieve.yaml; {_RUN_AGAIN}",
    StoreFault.CREDENTIALS: f"renew them at their source: `storage` in pgsieve.yaml, the environment, a profile or the"
    f" machine's role; {_RUN_AGAIN}",
    StoreFault.NO_CREDENTIALS: "give them in `storage` of pgsieve.yaml, in the environment, in a profile or by the machine's"
    " role; if an endpoint is given, a profile must have the keys themselves: no role, single sign-on or process is used"
    f" then; {_RUN_AGAIN}",
    StoreFault.DENIED: "these credentials need the right to list, read, write and delete objects below the lake, and the"
    f" bucket may not be read-only; {_RUN_AGAIN}",
    StoreFault.REGION: f"give the bucket's `region` in `storage` of pgsieve.yaml, or as AWS_REGION; {_RUN_AGAIN}",
    StoreFault.BUSY: "run again later: nothing is lost, a slot is confirmed only up to what the lake holds",
    StoreFault.NO_FILE_SYSTEM: "let Spark fetch the package of the file system, as by `spark.jars.packages` in `spark.conf` of"
    f' pgsieve.yaml (pgsieve\'s documentation, "Platforms: what to set, and what was run"); {_RUN_AGAIN}',
    StoreFault.UNREACHED: "check whether this machine reaches the endpoint that `storage` in pgsieve.yaml, the environment or a"
    f" profile names; {_RUN_AGAIN}",
}

#: Maps the codes in the answers of stores to faults. S3, Azure and Google use some of the same codes.
_FAULT_BY_CODE = {
    **dict.fromkeys(
        ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "FilesystemNotFound"),
        StoreFault.NO_BUCKET,
    ),
    **dict.fromkeys(
        (
            *(
                "ExpiredToken",
                "ExpiredTokenException",
                "TokenRefreshRequired",
                "InvalidToken",
                "RequestExpired",
            ),
            *("InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "AuthenticationFailed"),
            *("InvalidAuthenticationInfo", "AuthenticationRequired"),
        ),
        StoreFault.CREDENTIALS,
    ),
    **dict.fromkeys(
        (
            *("AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "MethodNotAllowed"),
            *("AuthorizationFailure", "AuthorizationPermissionMismatch", "InsufficientAccountPermissions"),
        ),
        StoreFault.DENIED,
    ),
    **dict.fromkeys(
        ("AuthorizationHeaderMalformed", "PermanentRedirect"),
        StoreFault.REGION,
    ),
    **dict.fromkeys(
        (
            *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "ServerBusy"),
            *("OperationTimedOut", "ThrottlingException", "TooManyRequests"),
        ),
        StoreFault.BUSY,
    ),
}
_FAULT_BY_STATUS = {
    "401": StoreFault.CREDENTIALS,
    "403": StoreFault.DENIED,
    **dict.fromkeys(("429", "500", "502", "503", "504"), StoreFault.BUSY),
}
#: Maps exceptions of Hadoop's file systems to faults. The messages of these exceptions contain no code.
_FAULT_BY_CLASS = {
    "UnknownStoreException": StoreFault.NO_BUCKET,
    "NoAuthWithAWSException": StoreFault.NO_CREDENTIALS,
    "NoAwsCredentialsException": StoreFault.NO_CREDENTIALS,
    "CredentialInitializationException": StoreFault.NO_CREDENTIALS,
    "AWSRedirectException": StoreFault.REGION,
    "AWSServiceThrottledException": StoreFault.BUSY,
    "AWSStatus500Exception": StoreFault.BUSY,
    "AWSNoResponseException": StoreFault.UNREACHED,
    "AWSApiCallTimeoutException": StoreFault.UNREACHED,
    "ApiCallTimeoutException": StoreFault.UNREACHED,
    "SdkClientException": StoreFault.UNREACHED,
}

#: Colours and arrows in the messages of delta-rs.
_DECORATION = re.compile("\x1b" + r"\[[0-9;]*m|↳")
#: The parts that show that a message is about the store, and not about a row or the publisher. They are a request
#: of delta-rs, or an exception of S3A or ABFS.
_STORE_ERROR = re.compile(
    r"Error performing [A-Z]+ |\(Service: \w+, Status Code: |org\.apache\.hadoop\.fs\.(?:s3a|azurebfs)\."
    r"|software\.amazon\.awssdk\.|AccessDeniedException: (?:s3a|abfss?)://"
)
_CODE = re.compile(r"<Code>(\w+)</Code>|Status Code: \d{3}[^\n]*?\):\s?([A-Z]\w+)|\bError(?:Code)?=(\w+)")
#: The answer 400 to a HEAD request. This answer has no body, and therefore no code. It means that the signature is
#: wrong; if the bucket were missing, the answer would be 404.
_BAD_HEAD = re.compile(
    r"Error performing HEAD [^\n]*non-2xx status code[:\s]+400\b|Status Code: 400\b[^\n]*?\):\s?(?:null|400 Bad Request)"
)
_STATUS_CODE = re.compile(r"non-2xx status code\s+(\d{3})|Status Code: (\d{3})")
#: A request to the address where a machine gets the credentials of its role. It fails if the machine has no role.
_METADATA_REQUEST = re.compile(
    r"Error performing [A-Z]+ http://(?:169\.254\.169\.254|metadata\.google\.internal)"
)
#: The message of Hadoop if a file system's class, or its scheme, is missing.
_NO_FILE_SYSTEM = re.compile(r"No FileSystem for scheme|Class [\w.]+\.hadoop\.fs\.[\w.]+ not found")
#: The message of delta-rs if S3 answers that the bucket is in another region.
_OTHER_REGION = "incorrectly configured region"
_CLASS = re.compile("|".join(_FAULT_BY_CLASS))
_NETWORK = re.compile(
    r"error sending request|error trying to connect|[Cc]onnection (?:refused|reset|closed)|dns error"
    r"|HTTP error|timed out|UnknownHostException|ConnectException|body from connection"
)


@dataclass(frozen=True)
class StoreRefusal:
    """A refusal by a store. `code` is the code in the store's answer, or None."""

    fault: StoreFault
    code: str | None = None

    @property
    def reason(self) -> str:
        """The reason of the refusal, with the code."""
        return self.fault.value + (f" ({self.code})" if self.code else "")

    @property
    def hint(self) -> str:
        """What a user can do."""
        return _HINT_BY_FAULT[self.fault]

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed a moment later."""
        return self.fault in {StoreFault.BUSY, StoreFault.UNREACHED}


def find_store_refusal(errors: Iterable[BaseException]) -> StoreRefusal | None:
    """The refusal by a store that an error or one of its causes reports. None if none of them does."""
    for error in errors:
        text = str(error)
        # An error of SQLSTATE class 22 quotes a value of a row, which may look like the message of a store.
        if "SQLSTATE: 22" not in text and (refusal := _find_refusal(_DECORATION.sub("", text))):
            return refusal
    return None


def _find_refusal(text: str) -> StoreRefusal | None:
    """The refusal that a message reports. None if it reports none."""
    if _NO_FILE_SYSTEM.search(text):
        return StoreRefusal(StoreFault.NO_FILE_SYSTEM)
    if not _STORE_ERROR.search(text):
        return None
    if _METADATA_REQUEST.search(text):
        return StoreRefusal(StoreFault.NO_CREDENTIALS)
    if _OTHER_REGION in text:
        return StoreRefusal(StoreFault.REGION)
    for match in _CODE.finditer(text):
        code = next(filter(None, match.groups()))
        if code in _FAULT_BY_CODE:
            return StoreRefusal(_FAULT_BY_CODE[code], code)
    if class_match := _CLASS.search(text):
        fault = _FAULT_BY_CLASS[class_match[0]]
        if fault is not StoreFault.UNREACHED or _NETWORK.search(text):
            return StoreRefusal(fault)
    if _BAD_HEAD.search(text):
        return StoreRefusal(StoreFault.CREDENTIALS, "HTTP 400")
    for match in _STATUS_CODE.finditer(text):
        status = match[1] or match[2]
        if status in _FAULT_BY_STATUS:
            return StoreRefusal(_FAULT_BY_STATUS[status], f"HTTP {status}")
    if re.search(r"AccessDeniedException: (?:s3a|abfss?)://", text):
        return StoreRefusal(StoreFault.DENIED)
    return StoreRefusal(StoreFault.UNREACHED) if _NETWORK.search(text) else None

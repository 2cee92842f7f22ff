"""Where a lake is and how each engine reaches it: an address and options -> delta-rs's options and Spark's settings.

In: `lake` and `storage` of pgsieve.yaml. Out: one address that both engines read, the settings of each, and
whether several writers may commit there at once. Missing options are left to the platform's usual way
(environment, profile, role of the machine); an engine gets what it would not find by itself. Raises
EndpointError where a server's address is invalid, and shows no secret: they are in no repr.

https://hadoop.apache.org/docs/r3.4.2/hadoop-aws/tools/hadoop-aws/index.html (S3A's settings)
https://hadoop.apache.org/docs/r3.4.2/hadoop-azure/abfs.html (those of ABFS)
https://docs.rs/object_store/latest/object_store/ (delta-rs' options)
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.aws_profile import AwsProfile
from pgsieve.resources.passwords import remember

#: By platform: its schemes, and the options that `storage` may have.
SCHEMES = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "gs": "gs"}
OPTIONS: dict[str, tuple[str, ...]] = {
    "s3": ("endpoint", "region", "access_key_id", "secret_access_key", "session_token", "path_style"),
    "azure": ("account_key", "sas_token", "tenant_id", "client_id", "client_secret"),
    "gs": ("service_account",),
}
#: Options that no message may show.
SECRETS = ("secret_access_key", "session_token", "account_key", "sas_token", "client_secret")
#: Schemes of file systems with atomic renames: Spark's commits are safe there beside those of other Sparks.
_ATOMIC = {"file", "hdfs", "viewfs"}

#: S3A's own chain knows neither profiles nor the token of a web identity.
_SDK_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_KEYS = "org.apache.hadoop.fs.s3a.{}AWSCredentialsProvider"
_TOKENS = "org.apache.hadoop.fs.azurebfs.oauth2.{}TokenProvider"
_DEFAULT_REGION = "us-east-1"
#: Variables that name another server than S3 itself: Spark gets what delta-rs reads of them.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
#: Variables from which delta-rs and obstore take a token for whatever keys they have, in any letter case.
_TOKEN_NAMES = {"AWS_SESSION_TOKEN", "AWS_TOKEN"}
#: Variables with credentials that take precedence over those of a profile.
_BEFORE_PROFILES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: The hosts of S3 itself.
_S3_ITSELF = re.compile(r"(?i)\.amazonaws\.com(?:\.cn)?\.?$")

#: A host that is an IP address.
_NUMBER = re.compile(r"[0-9.]+|[0-9a-f.]*:[0-9a-f:.]*")

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Two letters at least.


def is_uri(lake: str) -> bool:
    """Whether a lake is at a URI, and not in a folder."""
    return bool(_URI.match(lake))


#: Parts of a path at a URI that an engine misreads, or that the two engines write in different ways.
_AMBIGUOUS = re.compile(r"""[%?#*\\^`"<>|{}\[\]\x00-\x1f\x7f]""")
#: Parts of a folder that delta-rs turns into another path, or into none.
_AMBIGUOUS_IN_FOLDERS = re.compile(r"%[0-9A-Fa-f]{2}|[\\^|\[\]\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def misread(lake: str) -> tuple[str, str] | None:
    """Why the engines would not take an address for the same place, and what to do; None where they do.

    The message shows only single characters of the address, as it may have credentials.
    """
    if not is_uri(lake):
        if match := _AMBIGUOUS_IN_FOLDERS.search(lake):
            return (
                f"is a path with {match[0]!r}, which delta-rs reads as something else",
                "take another folder",
            )
        return None
    scheme, _, rest = lake.partition(":")
    if (scheme := scheme.lower()) not in {*SCHEMES, "file"}:
        return None  # Only Spark reaches it.
    bucket, _, path = rest.removeprefix("//").partition("/")
    if SCHEMES.get(scheme) in {"s3", "gs"} and not (rest.startswith("//") and _BUCKET.fullmatch(bucket)):
        hint = (
            f"write it as {scheme}://BUCKET/PATH; credentials and the server's address belong into `storage`"
        )
        return "has no bucket, or something else beside its name", hint
    if match := _AMBIGUOUS.search(path):
        return (
            f"has {match[0]!r} in its path, which not every engine takes for a part of a name",
            "take another path",
        )
    if {"", ".", ".."} & set(path.rstrip("/").split("/")) and path.strip("/"):
        return (
            "has an empty part of its path, or one of dots alone",
            "write each folder's name between single slashes",
        )
    return None


_LAST_PORT = 65535
#: A server's address that both engines accept: a name or number, perhaps a port, and perhaps a path above the
#: buckets.
_SERVER = re.compile(
    r"(?i)https?://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:/[a-z0-9._~%/-]*)?"
)


def misread_endpoint(endpoint: str) -> tuple[str, str] | None:
    """Why an address is not that of a server with S3's interface, and what to do; None where it is.

    The message shows nothing of the address, as it may have credentials.
    """
    hint = "write it as http://HOST:PORT or https://HOST"
    if "@" in endpoint:
        return (
            "has a user or a password before the host, which messages and names of objects would show",
            f"{hint}; credentials belong into `access_key_id` and `secret_access_key`, the environment or a profile",
        )
    if not re.match(r"(?i)https?://", endpoint):
        return "does not begin with http:// or https://", hint
    match = _SERVER.fullmatch(endpoint)
    if match is None or int(match["port"] or 0) > _LAST_PORT:
        return "is not the address of a server", hint
    return None


class EndpointError(PgsieveError):
    """The address of the lake's server is invalid; `named` is the setting that has it."""

    def __init__(self, lake: str, named: str, what: str, hint: str) -> None:
        super().__init__(f'lake "{lake}": {named} {what}', hint=hint)


@dataclass(frozen=True)
class Storage:
    """A lake's address and the options of its store."""

    address: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Whether Spark, in one session, is the only writer there.
    only_spark: bool = False

    @classmethod
    def of(
        cls, lake: str, options: Mapping[str, str] | None = None, *, only_spark: bool = False
    ) -> "Storage":
        """The storage of a lake in the configuration; S3's address gets the form that both engines accept."""
        address = lake.rstrip("/") or lake
        return cls(re.sub(r"(?i)^s3a?://", "s3a://", address), options or {}, only_spark=only_spark)

    def beside(self, address: str) -> "Storage":
        """The storage of another address: with the same options where it is in the same store, else as `storage_of` has it."""
        other = Storage.of(address, self.options, only_spark=self.only_spark)
        same = urlsplit(other.address)[:2] == urlsplit(self.address)[:2]
        return other if same else storage_of(address)

    @property
    def scheme(self) -> str:
        """The scheme of the address; `file` where it is a path."""
        return urlsplit(self.address).scheme.lower() if is_uri(self.address) else "file"

    @property
    def platform(self) -> str | None:
        """`s3`, `azure` or `gs`; None where no platform's options apply."""
        return SCHEMES.get(self.scheme)

    @property
    def folder(self) -> str | None:
        """The folder on this machine; None where it is elsewhere."""
        return None if is_uri(self.address) else self.address

    @property
    def by_delta_rs(self) -> bool:
        """Whether delta-rs reads and writes there, beside Spark; at `file://` only Spark does."""
        return not self.only_spark and (self.folder is not None or self.platform is not None)

    @property
    def is_safe(self) -> bool:
        """Whether the store keeps the first of two commits of one version, whichever engine makes them."""
        return self.platform is not None or self.scheme in _ATOMIC

    def endpoint(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The address of S3's interface, where the options, the environment or a profile name one.

        Raises EndpointError where that is not a server's: with some such addresses delta-rs panics.
        """
        if self.platform != "s3":
            return None
        given = {"`storage.endpoint`": self.options.get("endpoint")}
        given |= {name: environ.get(name) for name in _ENDPOINTS}
        named, endpoint = next(((name, value) for name, value in given.items() if value), (None, None))
        if named is None or endpoint is None:
            named, endpoint = "`endpoint_url` of a profile of AWS' tools", AwsProfile.of(environ).endpoint
        if endpoint and (problem := misread_endpoint(endpoint)):
            raise EndpointError(self.address, named, *problem)
        return endpoint

    def imitates_s3(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the store has S3's interface and is not S3 itself, whose conditions are documented."""
        endpoint = self.endpoint(environ)
        return endpoint is not None and not _S3_ITSELF.search(urlsplit(endpoint).hostname or "")

    def _by_path(self, environ: Mapping[str, str]) -> str | None:
        """Whether the bucket is in the path, and not in the host's name; None where an engine may choose.

        A server addressed by number has no names below it, whatever the settings say.
        """
        endpoint = self.endpoint(environ)
        if endpoint and _NUMBER.fullmatch(urlsplit(endpoint).hostname or ""):
            return "true"
        return self.options.get("path_style") or ("true" if endpoint else None)

    def _endpoint_with_bucket(self, endpoint: str) -> str:
        """A server's address whose host begins with the bucket, as it may already do."""
        parts = urlsplit(self._endpoint_without_bucket(endpoint))
        return parts._replace(netloc=f"{self._bucket}.{parts.netloc}").geturl()

    def _endpoint_without_bucket(self, endpoint: str) -> str:
        """A server's address with the common host of all buckets, where each has a host of its own."""
        parts = urlsplit(endpoint)
        return parts._replace(netloc=parts.netloc.removeprefix(f"{self._bucket}.")).geturl()

    @property
    def _bucket(self) -> str:
        return urlsplit(self.address).netloc

    def delta_rs_options(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """delta-rs's options; it takes others from the environment and the machine by itself."""
        option = self.options.get
        if self.platform == "s3":
            endpoint, by_path = self.endpoint(environ), self._by_path(environ)
            if endpoint and by_path == "false":
                # Here delta-rs adds no bucket to the host.
                endpoint = self._endpoint_with_bucket(endpoint)
            options = {
                "aws_endpoint_url": endpoint,
                # This takes precedence over the former, and in the environment over what is set here.
                "aws_endpoint_url_s3": endpoint,
                "aws_region": option("region"),
                "aws_access_key_id": option("access_key_id"),
                "aws_secret_access_key": option("secret_access_key"),
                "aws_session_token": option("session_token"),
                "aws_conditional_put": "etag",
                **self._of_a_profile(environ, endpoint),
            }
            if (endpoint or "").lower().startswith("http://"):
                options["aws_allow_http"] = "true"
            if by_path is not None:
                # The environment may set another value, which Spark does not read.
                options["aws_virtual_hosted_style_request"] = "false" if by_path == "true" else "true"
        elif self.platform == "azure":
            options = {
                "azure_storage_account_key": option("account_key"),
                "azure_storage_sas_key": option("sas_token"),
                "azure_storage_tenant_id": option("tenant_id"),
                "azure_storage_client_id": option("client_id"),
                "azure_storage_client_secret": option("client_secret"),
            }
        else:
            options = {"google_service_account": option("service_account")}
        return {name: value for name, value in options.items() if value is not None}

    def _of_a_profile(self, environ: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
        """What delta-rs would not find in a profile by itself: it reads none where an endpoint is given.

        Keys are given in any case, for other users of delta-rs's options. But a token expires, and where
        delta-rs reads the profile itself, it reads it again.
        """
        profile, options = AwsProfile.of(environ), {}
        if profile.region and not self._region(environ):
            options["aws_region"] = profile.region
        has_keys = "access_key_id" in self.options or any(environ.get(name) for name in _BEFORE_PROFILES)
        if not has_keys and (endpoint or not profile.ends):
            remember(*profile.secrets)
            options |= profile.keys
        return options

    def _region(self, environ: Mapping[str, str]) -> str | None:
        return self.options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")

    def spark_settings(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The settings of Spark's file system.

        For a lake without `storage`, what Spark would not find by itself.
        """
        if self.platform == "s3":
            settings = self._s3a(environ)
        elif self.platform == "azure":
            settings = self._abfs()
        elif self.platform == "gs" and (file := self.options.get("service_account")):
            settings = {
                "fs.gs.auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
                "fs.gs.auth.service.account.json.keyfile": file,
            }
        else:
            settings = {}
        return {name: value for name, value in settings.items() if value is not None}

    def _s3a(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        option = self.options.get
        endpoint, by_path = self.endpoint(environ), self._by_path(environ)
        if endpoint and by_path == "false":
            endpoint = self._endpoint_without_bucket(endpoint)
        region = self._region(environ) or AwsProfile.of(environ).region
        provider = _SDK_CHAIN
        if option("access_key_id"):
            provider = _KEYS.format("Temporary" if option("session_token") else "Simple")
        return {
            "fs.s3a.endpoint": endpoint,
            "fs.s3a.endpoint.region": region or (_DEFAULT_REGION if endpoint else None),
            "fs.s3a.path.style.access": by_path,
            "fs.s3a.aws.credentials.provider": provider,
            "fs.s3a.access.key": option("access_key_id"),
            "fs.s3a.secret.key": option("secret_access_key"),
            "fs.s3a.session.token": option("session_token"),
        }

    def _abfs(self) -> dict[str, str | None]:
        option, account = self.options.get, urlsplit(self.address).hostname
        if option("account_key"):
            return {f"fs.azure.account.key.{account}": option("account_key")}
        if option("sas_token"):
            return {
                f"fs.azure.account.auth.type.{account}": "SAS",
                f"fs.azure.sas.fixed.token.{account}": option("sas_token"),
            }
        kind = f"fs.azure.account.oauth.provider.type.{account}"
        if not option("client_secret"):
            return {f"fs.azure.account.auth.type.{account}": "OAuth", kind: _TOKENS.format("Msi")}
        tokens = f"https://login.microsoftonline.com/{option('tenant_id')}/oauth2/token"
        return {
            f"fs.azure.account.auth.type.{account}": "OAuth",
            kind: _TOKENS.format("ClientCreds"),
            f"fs.azure.account.oauth2.client.id.{account}": option("client_id"),
            f"fs.azure.account.oauth2.client.secret.{account}": option("client_secret"),
            f"fs.azure.account.oauth2.client.endpoint.{account}": tokens,
        }

    def log_store_settings(self) -> dict[str, str]:
        """The log store with which a session commits there; Delta's own are right except for S3."""
        return {log_store.SETTING: log_store.CLASS} if self.platform == "s3" else {}


#: Dagster shows the fields of resources, so the options of a lake's storage are kept apart from them, by
#: address.
_declared: dict[str, Storage] = {}


def declare(storage: Storage) -> None:
    """Let this process use a lake with these options, and let no text show its secrets."""
    remember(*(storage.options.get(name) for name in SECRETS))
    _declared[storage.address] = storage


def storage_of(address: str) -> Storage:
    """The storage of a lake: as it was declared, or else by its address alone."""
    return _declared.get(address) or Storage.of(address)


def keep_token_out(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Keep delta-rs and obstore from sending an empty token, or one that belongs to other keys.

    A token of this process's environment may belong to another place than the keys in the options.

    Nothing among their options says that there is no token: an empty one is sent as such, which S3 refuses. So the variable is taken
    from what they read, which is the environment as the system has it. Python's own copy keeps it, and with it the JVM and the commands
    that are given that copy: there the token may be needed with the keys beside it.
    """
    if options.get("aws_session_token"):
        return
    for name, value in environ.items():
        if name.upper() in _TOKEN_NAMES and (not value or "aws_access_key_id" in options):
            os.unsetenv(name)

"""Interprets the address and the options of a lake for delta-rs and for Spark, the two engines.

In: `lake` and `storage` of pgsieve.yaml.
Out: - an address that both engines accept
     - the options for delta-rs, and the settings of Spark
     - whether several writers may commit to the lake at the same time

If an option is missing, an engine takes it from the usual sources of the platform: the environment, a profile, or
the role of the machine. If an engine does not read one of these sources, this module reads the source and passes
the options to the engine. Raises EndpointError if the address of a server is invalid. No repr shows a secret.

https://hadoop.apache.org/docs/r3.4.2/hadoop-aws/tools/hadoop-aws/index.html (S3A's settings)
https://hadoop.apache.org/docs/r3.4.2/hadoop-azure/abfs.html (ABFS' settings)
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
from pgsieve.resources.passwords import remember_secrets

#: The platform of each scheme of an address, and the options of `storage` for each platform.
PLATFORM_BY_SCHEME = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "gs": "gs"}
OPTIONS_BY_PLATFORM: dict[str, tuple[str, ...]] = {
    "s3": ("endpoint", "region", "access_key_id", "secret_access_key", "session_token", "path_style"),
    "azure": ("account_key", "sas_token", "tenant_id", "client_id", "client_secret"),
    "gs": ("service_account",),
}
#: The options whose values no message may show.
SECRET_OPTIONS = ("secret_access_key", "session_token", "account_key", "sas_token", "client_secret")
#: The schemes of file systems that rename files atomically. Several Spark applications can safely commit there.
_ATOMIC_SCHEMES = {"file", "hdfs", "viewfs"}

#: The class with the AWS SDK's list of sources of credentials. S3A's own list has neither profiles nor the tokens of web
#: identities.
_SDK_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_KEY_PROVIDER = "org.apache.hadoop.fs.s3a.{}AWSCredentialsProvider"
_OAUTH_PROVIDER = "org.apache.hadoop.fs.azurebfs.oauth2.{}TokenProvider"
_DEFAULT_REGION = "us-east-1"
#: The environment variables that name another server than S3 itself. delta-rs reads them. Spark does not, and gets
#: the server from this module.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
#: The environment variables, in upper or lower case, from which delta-rs and obstore take a session token. They do
#: so even if they have the keys from another source.
_TOKEN_NAMES = {"AWS_SESSION_TOKEN", "AWS_TOKEN"}
#: The environment variables with credentials. They take precedence over the credentials of a profile.
_CREDENTIAL_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: The names of the hosts of S3 itself.
_S3_HOST = re.compile(r"(?i)\.amazonaws\.com(?:\.cn)?\.?$")

#: A host that is an IP address.
_IP_ADDRESS = re.compile(r"[0-9.]+|[0-9a-f.]*:[0-9a-f:.]*")

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # At least two letters before the colon.


def is_uri(lake: str) -> bool:
    """True if the address of a lake is a URI; False if it is the path of a folder."""
    return bool(_URI.match(lake))


#: The characters in the path of a URI that delta-rs or Spark misreads, or that the two write in different ways.
_AMBIGUOUS = re.compile(r"""[%?#*\\^`"<>|{}\[\]\x00-\x1f\x7f]""")
#: The parts in the path of a folder that delta-rs misreads or refuses.
_AMBIGUOUS_IN_FOLDERS = re.compile(r"%[0-9A-Fa-f]{2}|[\\^|\[\]\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def find_address_problem(lake: str) -> tuple[str, str] | None:
    """The reason why an engine would misread the address of a lake, and the remedy. None if no engine would misread it.

    The address may contain credentials. So the message shows only its scheme, and the characters that are misread.
    """
    if not is_uri(lake):
        if match := _AMBIGUOUS_IN_FOLDERS.search(lake):
            return (
                f"is a path with {match[0]!r}, which delta-rs reads as something else",
                "take another folder",
            )
        return None
    scheme, _, rest_of_address = lake.partition(":")
    if (scheme := scheme.lower()) not in {*PLATFORM_BY_SCHEME, "file"}:
        return None  # Only Spark reads this address.
    bucket, _, path = rest_of_address.removeprefix("//").partition("/")
    if PLATFORM_BY_SCHEME.get(scheme) in {"s3", "gs"} and not (
        rest_of_address.startswith("//") and _BUCKET.fullmatch(bucket)
    ):
        hint = (
            f"write it as {scheme}://BUCKET/PATH; credentials and the server's address belong into `storage`"
        )
        return "has no bucket, or more than a bucket's name before the path", hint
    if match := _AMBIGUOUS.search(path):
        return (
            f"has {match[0]!r} in its path, which not every engine reads as a part of a name",
            "take another path",
        )
    if {"", ".", ".."} & set(path.rstrip("/").split("/")) and path.strip("/"):
        return (
            "has an empty part in its path, or a part of dots alone",
            "write each folder's name between single slashes",
        )
    return None


_LAST_PORT = 65535
#: The address of a server, in the form that both engines accept: a host, optionally a port, and optionally a path
#: above the buckets.
_SERVER = re.compile(
    r"(?i)https?://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:/[a-z0-9._~%/-]*)?"
)


def find_endpoint_problem(endpoint: str) -> tuple[str, str] | None:
    """The reason why an address is invalid for a server with the interface of S3, and the remedy. None if it is valid.

    The address may contain credentials, so the message shows nothing of it.
    """
    hint = "write it as http://HOST:PORT or https://HOST"
    if "@" in endpoint:
        return (
            "has a user or a password before the host, which messages would show",
            f"{hint}; credentials belong into `access_key_id` and `secret_access_key`, the environment or a profile",
        )
    if not re.match(r"(?i)https?://", endpoint):
        return "does not begin with http:// or https://", hint
    match = _SERVER.fullmatch(endpoint)
    if match is None or int(match["port"] or 0) > _LAST_PORT:
        return "is not the address of a server", hint
    return None


class EndpointError(PgsieveError):
    """A setting has an invalid address for the server of the lake."""

    def __init__(self, lake: str, setting: str, problem: str, hint: str) -> None:
        super().__init__(f'lake "{lake}": {setting} {problem}', hint=hint)


@dataclass(frozen=True)
class Storage:
    """The address of a lake, and the options of the store where the lake is."""

    address: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: True if a single session of Spark is the only writer there.
    is_written_only_by_spark: bool = False

    @classmethod
    def from_address(
        cls, lake: str, options: Mapping[str, str] | None = None, *, is_written_only_by_spark: bool = False
    ) -> "Storage":
        """The storage of a lake in the configuration. An address on S3 is changed to the form that both engines accept."""
        address = lake.rstrip("/") or lake
        return cls(
            re.sub(r"(?i)^s3a?://", "s3a://", address),
            options or {},
            is_written_only_by_spark=is_written_only_by_spark,
        )

    def with_address(self, address: str) -> "Storage":
        """The storage of another address: with these options if it is in the same store, else from `find_storage`."""
        storage = Storage.from_address(
            address, self.options, is_written_only_by_spark=self.is_written_only_by_spark
        )
        is_same_store = urlsplit(storage.address)[:2] == urlsplit(self.address)[:2]
        return storage if is_same_store else find_storage(address)

    @property
    def scheme(self) -> str:
        """The scheme of the address. It is `file` if the address is the path of a folder."""
        return urlsplit(self.address).scheme.lower() if is_uri(self.address) else "file"

    @property
    def platform(self) -> str | None:
        """The platform of the address: `s3`, `azure` or `gs`. None for other addresses."""
        return PLATFORM_BY_SCHEME.get(self.scheme)

    @property
    def folder(self) -> str | None:
        """The path of the folder on this machine. None if the address is a URI."""
        return None if is_uri(self.address) else self.address

    @property
    def is_reached_by_delta_rs(self) -> bool:
        """True if both delta-rs and Spark read and write there. At `file://` only Spark does."""
        return not self.is_written_only_by_spark and (self.folder is not None or self.platform is not None)

    @property
    def has_atomic_commits(self) -> bool:
        """True if the store refuses the second of two commits with the same version number, whichever engines make them."""
        return self.platform is not None or self.scheme in _ATOMIC_SCHEMES

    def endpoint(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The address of a server with the interface of S3. None if no option, no variable and no profile names one.

        Raises EndpointError if the address is invalid, because delta-rs would crash with some invalid addresses.
        """
        if self.platform != "s3":
            return None
        environ = os.environ if environ is None else environ
        settings = {"`storage.endpoint`": self.options.get("endpoint")}
        settings |= {name: environ.get(name) for name in _ENDPOINT_VARIABLES}
        setting, endpoint = next(((name, value) for name, value in settings.items() if value), (None, None))
        if setting is None or endpoint is None:
            setting, endpoint = (
                "`endpoint_url` of a profile of AWS' tools",
                AwsProfile.read_active(environ).endpoint,
            )
        if endpoint and (problem := find_endpoint_problem(endpoint)):
            raise EndpointError(self.address, setting, *problem)
        return endpoint

    def is_s3_imitation(self, environ: Mapping[str, str] | None = None) -> bool:
        """True if the store has the interface of S3, but is not S3 itself.

        S3 itself is known to handle conditional writes.
        """
        endpoint = self.endpoint(environ)
        return endpoint is not None and not _S3_HOST.search(urlsplit(endpoint).hostname or "")

    def _choose_path_style(self, environ: Mapping[str, str]) -> str | None:
        """The text "true" if a request has the bucket's name in its path, "false" if in the name of the host.

        None if each engine may choose. If the host is an IP address, the bucket is always in the path, whatever
        the settings are.
        """
        endpoint = self.endpoint(environ)
        if endpoint and _IP_ADDRESS.fullmatch(urlsplit(endpoint).hostname or ""):
            return "true"
        return self.options.get("path_style") or ("true" if endpoint else None)

    def _make_endpoint_with_bucket(self, endpoint: str) -> str:
        """The address of a server, with the bucket before the host. The address `endpoint` may have the bucket already."""
        parts = urlsplit(self._make_endpoint_without_bucket(endpoint))
        return parts._replace(netloc=f"{self._bucket}.{parts.netloc}").geturl()

    def _make_endpoint_without_bucket(self, endpoint: str) -> str:
        """The address of a server, without the bucket before the host."""
        parts = urlsplit(endpoint)
        return parts._replace(netloc=parts.netloc.removeprefix(f"{self._bucket}.")).geturl()

    @property
    def _bucket(self) -> str:
        return urlsplit(self.address).netloc

    def make_delta_rs_options(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The options for delta-rs. It reads more options itself, from the environment and the machine."""
        get_option = self.options.get
        environ = os.environ if environ is None else environ
        if self.platform == "s3":
            endpoint, path_style = self.endpoint(environ), self._choose_path_style(environ)
            if endpoint and path_style == "false":
                # delta-rs does not itself add the bucket to the host.
                endpoint = self._make_endpoint_with_bucket(endpoint)
            options = {
                "aws_endpoint_url": endpoint,
                # This option takes precedence over the option before it. If it were missing, delta-rs would use the
                # environment variable AWS_ENDPOINT_URL_S3.
                "aws_endpoint_url_s3": endpoint,
                "aws_region": get_option("region"),
                "aws_access_key_id": get_option("access_key_id"),
                "aws_secret_access_key": get_option("secret_access_key"),
                "aws_session_token": get_option("session_token"),
                "aws_conditional_put": "etag",
                **self._read_profile_options(environ, endpoint),
            }
            if (endpoint or "").lower().startswith("http://"):
                options["aws_allow_http"] = "true"
            if path_style is not None:
                # delta-rs would otherwise use an environment variable, which Spark does not read.
                options["aws_virtual_hosted_style_request"] = "false" if path_style == "true" else "true"
        elif self.platform == "azure":
            options = {
                "azure_storage_account_key": get_option("account_key"),
                "azure_storage_sas_key": get_option("sas_token"),
                "azure_storage_tenant_id": get_option("tenant_id"),
                "azure_storage_client_id": get_option("client_id"),
                "azure_storage_client_secret": get_option("client_secret"),
            }
        else:
            options = {"google_service_account": get_option("service_account")}
        return {name: value for name, value in options.items() if value is not None}

    def _read_profile_options(self, environ: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
        """The options that come from a profile. If there is an endpoint, delta-rs itself reads no profile.

        The profile's access keys are options even without an endpoint, because other libraries use these options, too.
        Keys that expire are not options without an endpoint: then delta-rs reads the profile itself, and reads it again
        when it needs new keys.
        """
        profile, options = AwsProfile.read_active(environ), {}
        if profile.region and not self._find_region(environ):
            options["aws_region"] = profile.region
        has_keys = "access_key_id" in self.options or any(environ.get(name) for name in _CREDENTIAL_VARIABLES)
        if not has_keys and (endpoint or not profile.has_expiring_keys):
            remember_secrets(*profile.secrets)
            options |= profile.keys
        return options

    def _find_region(self, environ: Mapping[str, str]) -> str | None:
        return self.options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")

    def make_spark_settings(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The settings for this lake that Spark's file system does not find itself."""
        environ = os.environ if environ is None else environ
        if self.platform == "s3":
            settings = self._make_s3a_settings(environ)
        elif self.platform == "azure":
            settings = self._make_abfs_settings()
        elif self.platform == "gs" and (file := self.options.get("service_account")):
            settings = {
                "fs.gs.auth.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
                "fs.gs.auth.service.account.json.keyfile": file,
            }
        else:
            settings = {}
        return {name: value for name, value in settings.items() if value is not None}

    def _make_s3a_settings(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The settings of S3A, Hadoop's file system for S3."""
        get_option = self.options.get
        endpoint, path_style = self.endpoint(environ), self._choose_path_style(environ)
        if endpoint and path_style == "false":
            endpoint = self._make_endpoint_without_bucket(endpoint)
        region = self._find_region(environ) or AwsProfile.read_active(environ).region
        provider = _SDK_CHAIN
        if get_option("access_key_id"):
            provider = _KEY_PROVIDER.format("Temporary" if get_option("session_token") else "Simple")
        return {
            "fs.s3a.endpoint": endpoint,
            "fs.s3a.endpoint.region": region or (_DEFAULT_REGION if endpoint else None),
            "fs.s3a.path.style.access": path_style,
            "fs.s3a.aws.credentials.provider": provider,
            "fs.s3a.access.key": get_option("access_key_id"),
            "fs.s3a.secret.key": get_option("secret_access_key"),
            "fs.s3a.session.token": get_option("session_token"),
        }

    def _make_abfs_settings(self) -> dict[str, str | None]:
        """The settings of ABFS, Hadoop's file system for Azure."""
        get_option, account = self.options.get, urlsplit(self.address).hostname
        if get_option("account_key"):
            return {f"fs.azure.account.key.{account}": get_option("account_key")}
        if get_option("sas_token"):
            return {
                f"fs.azure.account.auth.type.{account}": "SAS",
                f"fs.azure.sas.fixed.token.{account}": get_option("sas_token"),
            }
        provider_setting = f"fs.azure.account.oauth.provider.type.{account}"
        if not get_option("client_secret"):
            return {
                f"fs.azure.account.auth.type.{account}": "OAuth",
                provider_setting: _OAUTH_PROVIDER.format("Msi"),
            }
        token_url = f"https://login.microsoftonline.com/{get_option('tenant_id')}/oauth2/token"
        return {
            f"fs.azure.account.auth.type.{account}": "OAuth",
            provider_setting: _OAUTH_PROVIDER.format("ClientCreds"),
            f"fs.azure.account.oauth2.client.id.{account}": get_option("client_id"),
            f"fs.azure.account.oauth2.client.secret.{account}": get_option("client_secret"),
            f"fs.azure.account.oauth2.client.endpoint.{account}": token_url,
        }

    def log_store_settings(self) -> dict[str, str]:
        """Spark's setting that chooses the log store, the class that writes commits.

        Only S3 needs another class than Delta's own.
        """
        return {log_store.SETTING: log_store.CLASS} if self.platform == "s3" else {}


#: The storages that were declared, by their addresses. They are not fields of a Dagster resource, because Dagster
#: would show such fields, and the options contain secrets.
_storage_by_address: dict[str, Storage] = {}


def declare_storage(storage: Storage) -> None:
    """Declare the storage of a lake for this process, and keep its secrets out of messages."""
    remember_secrets(*(storage.options.get(name) for name in SECRET_OPTIONS))
    _storage_by_address[storage.address] = storage


def find_storage(address: str) -> Storage:
    """The storage that was declared for an address. If none was declared, a storage with the address alone."""
    return _storage_by_address.get(address) or Storage.from_address(address)


def hide_token(options: Mapping[str, str]) -> None:
    """Keep delta-rs and obstore from sending a session token that is empty, or that belongs to other keys.

    The environment may have a token that belongs to other keys than those in the options. An option with an empty
    token would not help, because S3 refuses an empty token. So the variable is removed from the environment of the
    process, which these libraries read. Python's `os.environ` still has it, for the JVM and for commands that use
    the keys of the environment.
    """
    if options.get("aws_session_token"):
        return
    for name, value in os.environ.items():
        if name.upper() in _TOKEN_NAMES and (not value or "aws_access_key_id" in options):
            os.unsetenv(name)

"""Reads the active profile of the tools of AWS: a server, a region, and keys.

In: the environment variables, which may name the profile and its files. By default the files are ~/.aws/config and
    ~/.aws/credentials.
Out: the settings of the profile.

The credentials of roles and of single sign-on must be requested from a server. This module does not do that; the
engines do. A file in another format counts as a file without settings. Raises nothing. No repr shows a secret.

https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html
https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html
"""

from collections.abc import Mapping
from configparser import Error, RawConfigParser
from dataclasses import dataclass, field
from pathlib import Path

_KEY, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
#: Settings of a profile whose credentials must be requested. They take precedence over keys in the same profile.
_ROLE_SETTINGS = ("role_arn", "sso_session", "sso_start_url", "sso_account_id", "sso_role_name")
#: Settings of a profile whose credentials must be requested. Keys in the same profile take precedence over them.
_REQUEST_SETTINGS = ("credential_process", "login_session", "web_identity_token_file")
#: The environment variable that makes the tools of AWS ignore the endpoints in the files.
_IGNORE_ENDPOINTS = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
_ENDPOINT = "endpoint_url"


@dataclass(frozen=True)
class AwsProfile:
    """The settings of a profile."""

    #: The address of a server with the interface of S3. None if the files have none, or if it must be ignored.
    endpoint: str | None = None
    region: str | None = None
    #: The key, its secret and optionally its token, by their names in the files. Empty if the credentials must be
    #: requested.
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: True if the profile has credentials, or settings by which they can be requested.
    has_credentials: bool = False

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that no text may show."""
        return tuple(value for name, value in self.keys.items() if name != _KEY)

    @property
    def has_expiring_keys(self) -> bool:
        """True if the keys expire after some hours. A tool of the user then writes new keys into the file."""
        return _TOKEN in self.keys

    @classmethod
    def read_active(cls, environ: Mapping[str, str]) -> "AwsProfile":
        """The profile that is active in this environment."""
        config = _read_sections(_find_file_path(environ, "AWS_CONFIG_FILE", "config"))
        credentials = _read_sections(_find_file_path(environ, "AWS_SHARED_CREDENTIALS_FILE", "credentials"))
        name = environ.get("AWS_PROFILE") or "default"
        default = config.get(name, {}) if name == "default" else {}
        settings = {**default, **config.get(f"profile {name}", {}), **credentials.get(name, {})}
        has_role = any(settings.get(role) for role in _ROLE_SETTINGS)
        return cls(
            endpoint=_choose_endpoint(settings, config, environ),
            region=settings.get("region"),
            keys={} if has_role else _select_keys(settings),
            has_credentials=any(settings.get(name) for name in (_KEY, *_ROLE_SETTINGS, *_REQUEST_SETTINGS)),
        )


def _select_keys(settings: Mapping[str, str]) -> dict[str, str]:
    if not (settings.get(_KEY) and settings.get(_SECRET)):
        return {}
    return {name: settings[name] for name in (_KEY, _SECRET, _TOKEN) if settings.get(name)}


def _choose_endpoint(
    settings: Mapping[str, str], config: Mapping[str, Mapping[str, str]], environ: Mapping[str, str]
) -> str | None:
    """The server of a profile: the endpoint for S3 or, if there is none, the endpoint for all services."""
    ignores_endpoints = (
        environ.get(_IGNORE_ENDPOINTS) or settings.get("ignore_configured_endpoint_urls") or ""
    )
    if ignores_endpoints.lower() == "true":
        return None
    services = config.get(f"services {settings.get('services')}", {})
    return _parse_nested_settings(services.get("s3", "")).get(_ENDPOINT) or settings.get(_ENDPOINT) or None


def _parse_nested_settings(text: str) -> dict[str, str]:
    """The settings in the value of another setting. Each of them is an indented line."""
    split_lines = (line.partition("=") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in split_lines}


def _find_file_path(environ: Mapping[str, str], variable: str, name: str) -> Path | None:
    """The path of the configuration file or the credentials file. None if the user has no home directory."""
    home = environ.get("HOME")
    if path_of_variable := environ.get(variable):
        # The tools of AWS replace `~` by the home directory themselves, because a shell does not replace it within quotes.
        is_at_home = home and (path_of_variable == "~" or path_of_variable.startswith("~/"))
        return Path(f"{home}{path_of_variable[1:]}" if is_at_home else path_of_variable)
    return Path(home, ".aws", name) if home else None


def _read_sections(file: Path | None) -> dict[str, dict[str, str]]:
    """The settings of a file, by section. A section `[profile  "x"]` has the name `profile x`."""
    parser = RawConfigParser(
        delimiters=("=",), inline_comment_prefixes=("#", ";"), strict=False, empty_lines_in_values=False
    )
    try:
        parser.read_string(file.read_text() if file else "")
    except (OSError, UnicodeDecodeError, Error):
        return {}
    return {" ".join(name.replace('"', "").split()): dict(parser[name]) for name in parser.sections()}

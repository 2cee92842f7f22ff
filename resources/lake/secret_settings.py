"""Decides which settings of Spark are secret, and keeps them out of what Dagster stores and of messages.

In: the address of Spark's master, and settings (`spark` in pgsieve.yaml).
Out: - the address and the settings without secrets (`hide_settings`), which Dagster may show
    - the secrets of a lake (`find_hidden_settings`), for its session
    - messages without the secrets (`conceal_settings`)

Raises nothing.
"""

import re
from collections.abc import Mapping

from pgsieve.resources.passwords import remember_secrets

#: Spark's default pattern of the names of secret settings, and the names of Azure's secrets. A session of Spark gets this
#: pattern, too.
REDACTION_REGEX = "(?i)secret|password|passphrase|token|access[.]?key|account[.]key"
#: Values that are not removed from texts, even if their setting is secret: such short or common values are often in
#: texts for another reason.
_PUBLIC_VALUE = re.compile(r"(?i)true|false|\d+[a-z]{0,2}|.{0,7}")
#: The password in a URL, for example of a Maven repository.
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]+)@")

#: The settings of Spark that are secret, and the parameters of a Spark Connect address (`;token=…`), by the address of
#: the lake. They are not fields of a Dagster resource, because Dagster would show such fields.
_hidden_settings_by_lake: dict[str, tuple[Mapping[str, str], str]] = {}


def conceal_settings(master: str, conf: Mapping[str, str]) -> None:
    """Make `passwords.conceal_passwords` also remove the secrets in these settings, and in the parameters of the master."""
    parameters = dict(text.partition("=")[::2] for text in split_address(master)[1].split(";"))
    remember_secrets(
        *(
            secret
            for name, value in (*conf.items(), *parameters.items())
            for secret in _find_secrets(name, value)
            if not _PUBLIC_VALUE.fullmatch(secret)
        )
    )


def hide_settings(lake: str, master: str, conf: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Record the secret settings of Spark for a lake. Return the master and the settings without secrets."""
    address, parameters = split_address(master)
    hidden_settings = {name: value for name, value in conf.items() if _find_secrets(name, value)}
    _hidden_settings_by_lake[lake] = hidden_settings, parameters
    return address, {name: value for name, value in conf.items() if name not in hidden_settings}


def find_hidden_settings(lake: str) -> tuple[Mapping[str, str], str]:
    """The secret settings of Spark for a lake, and the parameters of its master. `hide_settings` has recorded them."""
    return _hidden_settings_by_lake.get(lake, ({}, ""))


def split_address(master: str) -> tuple[str, str]:
    """A master without its parameters, and the parameters with the `/;` or `;` before them. Only `sc://` has parameters.

    Spark requires a slash before the parameters. Without it the address is not valid, but its token is secret, too.
    """
    match = re.fullmatch(r"(sc://.*?)(/?;.*)", master, re.DOTALL)
    return (match[1], match[2]) if match else (master, "")


def _find_secrets(name: str, value: str) -> list[str]:
    """The secrets in a setting: its value, or only the passwords of its URLs and the values of its secret Java options."""
    if _is_secret_name(name):
        return [value]
    options = (option.partition("=") for option in value.split())
    return [
        *_URL_PASSWORD.findall(value),
        *(text.strip("\"'") for option_name, _, text in options if text and _is_secret_name(option_name)),
    ]


def _is_secret_name(name: str) -> bool:
    """True if the name of a setting or of a parameter says that its value is secret."""
    return re.search(REDACTION_REGEX, name) is not None

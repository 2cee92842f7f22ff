"""Removes passwords from messages, including messages of libpq, ADBC, Spark or a server.

In: - the connection strings and passwords in use (`remember_conninfo`, `remember_password`)
    - other secrets, for example keys of an object store (`remember_secrets`)
    - texts (`conceal_passwords`)
Out: the texts, in which no fragment of a password is left.

libpq may split a connection string (conninfo) in another place than its author meant. For example, it takes `word@db` in
`postgresql://me:pass@word@db/shop` for the host, and its error message shows this host. So everything in a URI
between the user's name and the last @ is treated as a secret. Raises nothing.
"""

import re
import time
from operator import itemgetter
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

#: The length of the fragments of a password that no text may show.
FRAGMENT_LENGTH = 4
#: How many passwords are remembered: those that were used last. The number is limited because a password command
#: makes a new password for each connection.
_MAX_PASSWORDS = 64

#: The parameters of a conninfo that are secret.
SECRET_KEYWORDS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
_URI_PASSWORD = re.compile(r"\s*postgres(?:ql)?://[^:@/]*:(.*)@", re.DOTALL)
_PLACEHOLDER = "..."

# Other threads may add secrets at any time. No lock protects these variables: the executors of a cluster get them with the
# functions that use them, and a lock cannot be sent. So each access is one operation of a built-in type.
_secrets: set[str] = set()
#: Maps each remembered password to the time when it was last used.
_last_use_by_password: dict[str, float] = {}


def remember_secrets(*secrets: str | None) -> None:
    """Remember these secrets, so that `conceal_passwords` removes them from texts. They are never forgotten."""
    _secrets.update(filter(None, secrets))


def remember_password(password: str | None) -> None:
    """Remember the password of a session, so that `conceal_passwords` removes it from texts.

    If there are too many passwords, the one that was not used for the longest time is forgotten.
    """
    if password:
        _last_use_by_password[password] = time.monotonic()
        passwords = tuple(_last_use_by_password.items())
        for oldest_password, _ in sorted(passwords, key=itemgetter(1))[:-_MAX_PASSWORDS]:
            _last_use_by_password.pop(oldest_password, None)


def remember_conninfo(conninfo: str) -> None:
    """Remember the passwords of a connection string, even if libpq takes a part of a password for something else."""
    try:
        parameters = conninfo_to_dict(conninfo)
    except psycopg.Error:
        parameters = {}
    for keyword in SECRET_KEYWORDS:
        if parameters.get(keyword):
            remember_password(str(parameters[keyword]))
    if match := _URI_PASSWORD.match(conninfo):
        remember_password(match[1])
        remember_password(unquote(match[1]))


def conceal_passwords(text: str) -> str:
    """The text, in which dots replace each part of a remembered password.

    A part is a fragment of four characters of the password, or the whole password if it is shorter.
    """
    are_secret = [False] * len(text)  # For each character.
    for secret in (*tuple(_secrets), *tuple(_last_use_by_password)):
        for begin, end in _find_occurrences(text, secret):
            are_secret[begin:end] = [True] * (end - begin)
    spans = re.finditer("1+|0+", "".join("01"[is_secret] for is_secret in are_secret))
    return "".join(_PLACEHOLDER if span[0][0] == "1" else text[span.start() : span.end()] for span in spans)


def _find_occurrences(text: str, secret: str) -> list[tuple[int, int]]:
    """The begin and end of each place in the text that shows a part of the secret."""
    if len(secret) < FRAGMENT_LENGTH:
        # Many words contain a short password by chance, so only a whole word counts.
        return [m.span() for m in re.finditer(rf"(?<!\w){re.escape(secret)}(?!\w)", text)]
    fragments = {
        secret[index : index + FRAGMENT_LENGTH] for index in range(len(secret) - FRAGMENT_LENGTH + 1)
    }
    return [
        (index, index + FRAGMENT_LENGTH)
        for index in range(len(text) - FRAGMENT_LENGTH + 1)
        if text[index : index + FRAGMENT_LENGTH] in fragments
    ]

"""Removes passwords from messages, including messages of libpq, ADBC, Spark or a server.

In: - the connection strings and passwords in use (`remember_secrets`)
    - texts (`conceal_passwords`)
Out: the texts, in which no fragment of a password is left.

libpq may split a conninfo in another place than its author meant. For example, it takes `word@db` in
`postgresql://me:pass@word@db/shop` for the host, and its error message shows this host. So everything in a URI
between the user's name and the last @ is treated as a secret. Raises nothing.
"""

import re
from collections import deque
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

#: The length of the fragments of a password that no text may show.
FRAGMENT_LENGTH = 4
#: How many passwords are remembered. The number is limited because a password command makes a new password for
#: each connection.
_MAX_SECRETS = 64

_PASSWORD_KEYWORDS = ("password", "sslpassword", "oauth_client_secret")
_URI_PASSWORD = re.compile(r"\s*postgres(?:ql)?://[^:@/]*:(.*)@", re.DOTALL)
_PLACEHOLDER = "..."

_secrets: deque[str] = deque(maxlen=_MAX_SECRETS)


def remember_secrets(*secrets: str | None) -> None:
    """Remember these secrets, so that `conceal_passwords` removes them from texts."""
    for secret in secrets:
        if secret and secret not in _secrets:
            _secrets.append(secret)


def remember_conninfo(conninfo: str) -> None:
    """Remember the passwords of a connection string, even if libpq takes a part of a password for something else."""
    try:
        parameters = conninfo_to_dict(conninfo)
    except psycopg.Error:
        parameters = {}
    remember_secrets(*(str(parameters[keyword]) for keyword in _PASSWORD_KEYWORDS if parameters.get(keyword)))
    if authority := _URI_PASSWORD.match(conninfo):
        remember_secrets(authority[1], unquote(authority[1]))


def conceal_passwords(text: str) -> str:
    """The text, in which dots replace each part of a remembered password.

    A part is a fragment of four characters of the password, or the whole password if it is shorter.
    """
    are_secret = [False] * len(text)  # For each character.
    for secret in tuple(_secrets):  # A copy, because other threads may add secrets meanwhile.
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

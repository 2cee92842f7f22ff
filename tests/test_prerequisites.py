"""scripts/prerequisites.sh, with programs on the PATH that only print a version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "prerequisites.sh"


@pytest.fixture
def bin_directory(tmp_path: Path) -> Path:
    """A PATH with only the programs that the script itself calls."""
    for program in ("sh", "sed"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    return tmp_path


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def java(path: Path, version: str) -> None:
    program(path, f"""printf 'openjdk version "{version}" 2025-04-15\\nOpenJDK Runtime\\n' >&2""")


def python(path: Path, version: str, *, venv: bool = True) -> None:
    program(
        path,
        f"""case $2 in
        *version_info*) echo {version} ;;
        *ensurepip*) exit {0 if venv else 1} ;;
        *executable*) echo {path} ;;
        esac""",
    )


def run(directory: Path, *wanted: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", SCRIPT, *wanted],
        env={"PATH": str(directory), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.7", "17-ea"])
def test_java_17_and_21_are_accepted_silently(bin_directory: Path, version: str) -> None:
    java(bin_directory / "java", version)
    done = run(bin_directory, "java")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_newer_java_is_accepted_with_a_note(bin_directory: Path) -> None:
    java(bin_directory / "java", "25.0.1")
    done = run(bin_directory, "java")
    assert done.returncode == 0
    assert "is Java 25; 17 or 21 is what Spark asks for" in done.stderr


@pytest.mark.parametrize(("version", "major"), [("11.0.2", "11"), ("1.8.0_402", "8")])
def test_an_older_java_is_refused(bin_directory: Path, version: str, major: str) -> None:
    java(bin_directory / "java", version)
    done = run(bin_directory, "java")
    assert done.returncode == 1
    assert f"java is Java {major}." in done.stderr
    assert "apt-get install openjdk-17-jre-headless" in done.stderr
    assert "brew install openjdk@17" in done.stderr


def test_java_home_precedes_the_path(bin_directory: Path) -> None:
    java(bin_directory / "java", "17.0.15")
    java(bin_directory / "old" / "bin" / "java", "11.0.2")
    assert run(bin_directory, "java", JAVA_HOME=str(bin_directory / "old")).returncode == 1


def test_options_that_java_repeats_do_not_hide_its_version(bin_directory: Path) -> None:
    program(
        bin_directory / "java",
        """printf 'Picked up JAVA_TOOL_OPTIONS: -Dx=y\\nopenjdk version "21.0.7"\\n' >&2""",
    )
    assert run(bin_directory, "java").returncode == 0


@pytest.mark.parametrize("body", [None, "echo 'Unable to locate a Java Runtime.' >&2; exit 1"])
def test_a_missing_java_is_reported_with_the_package_to_install(
    bin_directory: Path, body: str | None
) -> None:
    if body is not None:
        program(bin_directory / "java", body)
    done = run(bin_directory, "java")
    assert done.returncode == 1
    assert "java is not there or does not run" in done.stderr
    assert "apt-get install openjdk-17-jre-headless" in done.stderr


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ({"python3": "3.12"}, "python3"),
        ({"python3": "3.9", "python3.13": "3.13"}, "python3.13"),
        ({"python3.11": "3.11", "python3.13": "3.13"}, "python3.11"),
        ({"python": "3.11"}, "python"),
    ],
)
def test_the_first_python_that_fits_is_named(
    bin_directory: Path, installed: dict[str, str], chosen: str
) -> None:
    for name, version in installed.items():
        python(bin_directory / name, version)
    done = run(bin_directory, "python")
    assert (done.returncode, done.stdout.strip()) == (0, str(bin_directory / chosen))


@pytest.mark.parametrize("version", ["3.10", "3.15", "2.7"])
def test_a_python_of_another_version_is_refused(bin_directory: Path, version: str) -> None:
    python(bin_directory / "python3", version)
    done = run(bin_directory, "python")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"python3 ({version})" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr
    assert "brew install python@" in done.stderr


def test_a_requested_python_is_not_replaced_by_another(bin_directory: Path) -> None:
    python(bin_directory / "python3", "3.12")
    python(bin_directory / "mine", "3.10")
    done = run(bin_directory, "python", PYTHON="mine")
    assert done.returncode == 1
    assert "PYTHON=mine is not one" in done.stderr


def test_a_python_without_venv_is_refused(bin_directory: Path) -> None:
    python(bin_directory / "python3", "3.11", venv=False)
    done = run(bin_directory, "python")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_everything_missing_is_reported_at_once(bin_directory: Path) -> None:
    done = run(bin_directory)
    assert done.returncode == 1
    assert "pgsieve needs Python" in done.stderr
    assert "Spark needs Java" in done.stderr


def test_the_python_that_runs_the_tests_is_accepted(bin_directory: Path) -> None:
    done = run(bin_directory, "python", PYTHON=sys.executable, HOME=os.environ.get("HOME", ""))
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable)

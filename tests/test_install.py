"""scripts/install.py: the output of `make demo` and `make setup` while pip works, and after it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import pytest

from scripts.install import _BUILD_ENVIRONMENT, _NO_BYTECODE_VARIABLE, _compile, _Progress, _reason
from scripts.resolve_constraints import supported

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_pips_reason_is_printed_and_its_status_kept(tmp_path: Path) -> None:
    """A real pip fails, because it finds no build backend for pgsieve."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    import pip

    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", ROOT / "scripts" / "install.py", "demo"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(pip.__file__).parents[1]),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "No matching distribution found for" in done.stderr, done.stderr
    log = tmp_path / "venv" / "install.log"
    assert str(log) in done.stderr
    assert "No matching distribution found for" in log.read_text(encoding="utf-8")


def test_the_reason_leaves_out_the_lists_of_versions() -> None:
    lines = [
        "Collecting pymdown-extensions==13.1\n",
        "ERROR: Could not find a version that satisfies the requirement x==13.1 (from versions: 1.0, 1.1, 1.2)\n",
        "ERROR: No matching distribution found for x==13.1\n",
    ]
    assert list(_reason(lines)) == [
        "ERROR: Could not find a version that satisfies the requirement x==13.1",
        "ERROR: No matching distribution found for x==13.1",
    ]
    assert list(_reason(["what a program said that was killed\n"])) == ["what a program said that was killed"]


def test_progress_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = _Progress()
    for line in ("", "Collecting dagster<1.14\n", "Installing collected packages: a, b\n"):
        progress.show(line)
    progress.end()
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "  1 packages found, dagster<1.14"
    assert output[1] == "  putting 1 packages in place"


def test_imports_of_commands_are_compiled_once_if_python_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_NO_BYTECODE_VARIABLE, "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    _compile(["json.tool", "tomllib"])
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert compiled >= {"tool", "decoder", "_parser"}, "imports of imports are not compiled"


def test_constraints_are_resolved_for_every_python_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert supported(project["requires-python"]) == ["3.11.0", "3.12.0", "3.13.0", "3.14.0"]


def test_a_wheel_that_is_unpacked_at_once_is_not_compressed(tmp_path: Path) -> None:
    """A real setuptools builds the wheel, as for pyspark's source distribution."""
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='x', version='1', py_modules=['x'])\n"
    )
    (tmp_path / "x.py").write_text("#" * 10_000)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel"],
        cwd=tmp_path,
        env={**os.environ, **_BUILD_ENVIRONMENT},
        check=True,
    )
    (wheel,) = tmp_path.glob("dist/*.whl")
    with ZipFile(wheel) as built:
        assert {each.compress_type for each in built.infolist()} == {ZIP_STORED}

"""The container image and the hosted workflow, as far as their files tell: tests build no image."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(f"{name} ") for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    copied = [part for line in instructions("COPY") if "--from" not in line for part in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied
    for part in copied:
        assert (ROOT / part).exists()
        assert part not in ignored
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {part.split("/")[0] for part in wheel} <= set(copied)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= built["project"]["optional-dependencies"].keys()


def test_it_runs_as_a_user_without_rights_whom_kubernetes_can_tell() -> None:
    (user,) = instructions("USER")
    assert int(user) >= 1000
    after = DOCKERFILE[DOCKERFILE.index("USER ") :]
    assert "RUN" not in re.findall(r"^\w+", after, re.MULTILINE)


def test_the_workflow_runs_what_a_machine_of_ones_own_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" .ci/run")
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert workflow["permissions"] == {"contents": "read"}

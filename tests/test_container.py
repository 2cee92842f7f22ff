"""The container image and the hosted workflow, as far as their files show: no test builds an image."""

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


def test_every_copied_file_exists_and_is_not_ignored() -> None:
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


def test_the_image_runs_as_an_unprivileged_user_with_a_numeric_id() -> None:
    (user,) = instructions("USER")
    assert int(user) >= 1000
    after = DOCKERFILE[DOCKERFILE.index("USER ") :]
    assert "RUN" not in re.findall(r"^\w+", after, re.MULTILINE)


def test_the_workflow_runs_the_same_as_a_developers_machine() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" .ci/run")
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert workflow["permissions"] == {"contents": "read"}


def test_the_long_tests_run_each_night() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yaml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" make test-long")
    # YAML 1.1 reads the key `on` as true.
    assert len(workflow[True]["schedule"]) == 1

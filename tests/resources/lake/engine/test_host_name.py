"""A machine whose own name does not resolve."""

from __future__ import annotations

import os
import socket

import pytest

from pgsieve.resources.lake.engine.host_name import name_host

UNKNOWN = "no-such-host.invalid"


@pytest.mark.parametrize(
    ("master", "name", "chosen", "expected"),
    [
        ("local[2]", UNKNOWN, {}, "localhost"),
        ("local", "localhost", {}, None),
        ("spark://elsewhere:7077", UNKNOWN, {}, None),
        ("local", UNKNOWN, {"SPARK_LOCAL_HOSTNAME": "here"}, "here"),
        ("local", UNKNOWN, {"SPARK_LOCAL_IP": "127.0.0.1"}, None),
    ],
)
def test_a_local_master_is_on_localhost_where_the_name_of_the_machine_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch, master: str, name: str, chosen: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(os, "environ", {**chosen})
    name_host(master)
    assert os.environ.get("SPARK_LOCAL_HOSTNAME") == expected

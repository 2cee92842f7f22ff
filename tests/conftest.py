"""Shared fixtures: each module of tests/fixtures/ is a pytest plugin."""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.chromium",
    "tests.fixtures.oracle",
    "tests.fixtures.pooler",
    "tests.fixtures.s3_server",
    "tests.fixtures.servers",
    "tests.fixtures.shop",
    "tests.fixtures.standby",
    "tests.fixtures.tls",
]

"""Shared fixtures: each module of tests/fixtures/ is a pytest plugin."""

from __future__ import annotations

pytest_plugins = ["tests.fixtures.servers", "tests.fixtures.oracle"]

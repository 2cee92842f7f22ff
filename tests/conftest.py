"""Shared fixtures: each module of tests/fixtures/ is a pytest plugin."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A shell script starts background processes with SIGINT ignored, and Dagster gives SIGTERM the handler of SIGINT. Children inherit
# both settings, so no process that a test starts would end by a signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example may take any time.
settings.register_profile("any load", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


def pytest_xdist_auto_num_workers() -> int:
    """One process more than processors, for `--numprocesses auto`: tests wait for servers and stores a quarter of their time."""
    return (os.cpu_count() or 1) + 1


pytest_plugins = [
    "tests.fixtures.chromium",
    "tests.fixtures.console",
    "tests.fixtures.dagster_databases",
    "tests.fixtures.dagster_in_memory",
    "tests.fixtures.drawn",
    "tests.fixtures.oracle",
    "tests.fixtures.pooler",
    "tests.fixtures.s3_server",
    "tests.fixtures.secrets",
    "tests.fixtures.servers",
    "tests.fixtures.shop",
    "tests.fixtures.standby",
    "tests.fixtures.summary",
    "tests.fixtures.tls",
]

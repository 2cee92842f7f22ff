"""The oldest and the newest server that pgsieve replicates from, as in server_version_num.

A newer server may send messages that pgsieve does not know: `resources/postgres/source.py` refuses it.
"""

from __future__ import annotations

OLDEST_SERVER = 130000
"""The first version whose pgoutput publishes a partition tree by its root."""

NEWEST_SERVER = 190000
"""The newest tested version: CI tests its new features, `make test-19` all of replication.

`tests/test_server_versions.py` compares it with the tests."""

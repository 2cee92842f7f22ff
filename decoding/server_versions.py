"""The servers that pgsieve replicates from: the oldest and the newest tested one, as in server_version_num.

A newer server may send, or leave out, messages for which no rule here is written:
`resources/postgres/source.py` refuses it.
"""

from __future__ import annotations

OLDEST_SERVER = 130000
"""The first version whose pgoutput publishes a partition tree by its root."""

NEWEST_SERVER = 190000
"""The newest version that is tested: its new features in CI, all of replication by `make test-19`.

`tests/test_server_versions.py` compares it with the tests."""

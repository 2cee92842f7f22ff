"""The oldest and the newest server that pgsieve replicates from, as numbers like server_version_num.

`resources/postgres/source.py` refuses a newer major version unless the user allows it, because such a server may send
messages that pgsieve does not know.
"""

from __future__ import annotations

OLDEST_SERVER = 130000
"""The first version whose pgoutput publishes a partition tree by its root."""

NEWEST_SERVER = 190000
"""The newest tested version. CI tests only its new features; `make test-19` tests all of replication with it.

`tests/test_server_versions.py` compares this number with the tests."""

"""Tests with processes of another user."""

from __future__ import annotations

import os

#: Only root may start processes of another user.
collect_ignore = [] if os.geteuid() == 0 else ["test_other_users.py"]

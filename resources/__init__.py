"""The outside world: PostgreSQL and the lake, two halves that do not import each other.

Beside them `spool`, for messages that have to wait, and `failpoints`, where a test ends the process.
"""

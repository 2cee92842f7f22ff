"""The outside world: PostgreSQL and the lake, two halves that do not import each other.

Beside them are `spool`, for messages that have to wait, `passwords`, which keeps them out of messages, and `failpoints`,
where a test ends the process.
"""

"""The outside world: PostgreSQL and the lake, two halves that do not import each other.

`spool` keeps messages that have to wait. `passwords` keeps passwords out of messages. `failpoints` has the
places where a test can end the process.
"""

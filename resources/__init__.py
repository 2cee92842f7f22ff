"""All input and output: PostgreSQL in `postgres`, the lake in `lake`.

These two packages do not import each other. `spool` stores messages that have to wait. `passwords` keeps
passwords out of messages. `failpoints` are the places where a test can end the process.
"""

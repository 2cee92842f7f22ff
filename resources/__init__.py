"""All input and output of pgsieve: `postgres` talks to PostgreSQL servers, and `lake` reads and writes the lake.

The lake is the folder or bucket with the Delta tables. The two packages do not import each other. The other
modules here serve both of them. For example, `spool` stores messages that have to wait, `passwords` keeps
passwords out of messages, and `failpoints` lists the places where a test can end the process.
"""

"""Values of PostgreSQL's types: from text and binary format to Arrow columns, and back to the text of psql.

A type is added in `builtin_types` (its oid, and what Spark has for it) and `types` (how it is read).
"""

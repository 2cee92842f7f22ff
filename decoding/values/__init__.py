"""Values of PostgreSQL's types: from text and binary format to Arrow columns, and back to the text of psql.

A new type needs its oid in `builtin_types`, its Spark type and converters in `types`, and its text in
`output`; CONTRIBUTING, *Add a type*, has all steps.
"""

"""Values of PostgreSQL's types: from text and binary format to Arrow columns, and back to text.

CONTRIBUTING, *Add a type*, lists the steps for a new type.
"""

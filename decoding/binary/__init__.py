"""Bytes: reading them within bounds, writing them, and reading many values at once.

These modules do what the functions of PostgreSQL's pqformat.c do with a buffer. They know no message and no type.
"""

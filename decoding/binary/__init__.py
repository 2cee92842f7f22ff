"""Bytes: reading them within bounds, writing them, and looking at many at once.

What PostgreSQL's functions of pqformat.c do with a buffer; no message and no type is known to these modules.
"""

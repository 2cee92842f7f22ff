"""Checksums of rows and of segments of a table, as a server computes them for its own table.

The functions work on Arrow columns, and follow PostgreSQL's record_send, hash_array_extended and hashfn.c.
"""

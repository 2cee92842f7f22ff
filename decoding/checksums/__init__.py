"""Checksums of rows and of segments of a table, equal to those that the publisher computes in SQL.

The functions work on Arrow columns, and follow PostgreSQL's record_send(), hash_array_extended() and
hashfn.c.
"""

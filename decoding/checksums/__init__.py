"""Checksums of rows, and of segments (parts of a table). They equal the checksums that the publisher computes in SQL.

The functions work on Arrow columns. They follow PostgreSQL's record_send(), hash_array_extended() and hashfn.c.
"""

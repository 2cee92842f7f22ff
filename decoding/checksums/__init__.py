"""Rows and segments of rows as numbers that a server computes as well, so that both sides can be compared.

What record_send, hash_record_extended and hashfn.c do in PostgreSQL, on Arrow columns.
"""

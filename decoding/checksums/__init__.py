"""Rows and segments of rows as numbers that a server computes too, so that both sides can be compared.

They follow record_send, hash_record_extended and hashfn.c of PostgreSQL, on Arrow columns.
"""

"""Bytes: bounded reads of one message, writes, and reads of many values at once.

These modules do what the functions of PostgreSQL's pqformat.c do with a buffer. They depend on no message and
no type.
"""

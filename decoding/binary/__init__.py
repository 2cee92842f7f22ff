"""Bytes: bounded reads of one message, writes, and reads of many values at once.

These modules correspond to PostgreSQL's pqformat.c. They contain no rule of a message or a type.
"""

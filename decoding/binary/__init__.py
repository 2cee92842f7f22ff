"""Reads and writes bytes: one message with bounds checks, or many values at once.

These modules correspond to PostgreSQL's pqformat.c. They contain no rules of messages or types.
"""

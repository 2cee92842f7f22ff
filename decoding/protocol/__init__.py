"""Decodes pgoutput's messages: one at a time into dataclasses, or many at once into columns.

`transactions` assembles the messages of a session into complete transactions in commit order. `tuples` decodes the
rows in messages into typed columns.

PostgreSQL documentation, Logical Replication Message Formats.
"""

"""pgoutput's messages, PostgreSQL documentation 54.9: one at a time as dataclasses, or many as columns.

From a slot's bytes to whole transactions in commit order (`transactions`), and to typed columns (`tuples`).
"""

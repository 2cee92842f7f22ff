"""Checks of a replica: whether it equals the publisher's table, matches its row filters, and is fresh; and its repair.

`comparison` compares checksums of segments (parts of the rows). If segments differ, `difference` compares their rows.
"""

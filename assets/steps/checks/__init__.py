"""Checks of a replica: consistency with the publisher, conformity with row filters, freshness; and repair.

`comparison` first compares checksums of segments; `difference` then compares the rows of segments that differ.
"""

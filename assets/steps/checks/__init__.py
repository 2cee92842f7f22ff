"""Whether a replica is what it should be: consistency with the publisher, row filters, freshness; and repair.

Checksums of segments are compared first (`comparison`), then the rows of those that differ (`difference`).
"""

"""Checks of a replica: consistency with the publisher, row filters, freshness; and repair.

Checksums of segments are compared first (`comparison`), then the rows of segments that differ (`difference`).
"""

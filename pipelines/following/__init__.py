"""`pgsieve run --follow`: applies changes as they arrive, slice by slice.

A slice is the changes between two positions of the slot. A feed is a slot with the subscriptions that read it.

`follow` wires the steps, `follow_report` reports to Dagster, `metrics` serves Prometheus, `watch` ends a
stalled process.
"""

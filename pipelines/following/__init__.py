"""`pgsieve run --follow`: applies changes as they arrive.

`follow` wires the steps, `follow_report` reports to Dagster, `metrics` serves Prometheus, `watch` ends a
stalled process.
"""

"""`pgsieve run --follow`: applies changes as they arrive.

`follow` wires the steps, `follow_report` reports to Dagster, `metrics` reports to Prometheus, `watch` ends a
stalled process.
"""

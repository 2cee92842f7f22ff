"""`pgsieve run --follow`: changes are applied as they arrive, and other programs watch the process.

`follow` wires the steps, `follow_report` reports to Dagster, `metrics` reports to Prometheus, `watch` ends a
stalled process.
"""

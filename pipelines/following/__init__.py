"""`pgsieve run --follow`: changes are applied as they arrive, and other programs watch it.

`follow` wires the steps, `follow_report` tells Dagster, `metrics` tells Prometheus, `watch` ends what stands still.
"""

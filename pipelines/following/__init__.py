"""`pgsieve run --follow`: applies changes as they arrive, slice by slice, until it is stopped.

A slot stream is a replication slot with the subscriptions that read it. A slice is the changes between two positions of the
slot.

- `follow` is the command
- `follow_report` reports the work to Dagster
- `metrics` serves metrics to Prometheus
- `watch` ends the process if it has stalled
"""

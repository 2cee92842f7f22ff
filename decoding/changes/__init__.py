"""PostgreSQL's rules for changes as functions of Arrow batches.

This process, its threads and Spark all call these functions, so all produce the same rows.

- `columns` defines the columns of a change.
- `decode` turns messages into changes, and `transform` applies a subscription's row filters to them.
- `tally` counts changes.
- `net_change` reduces changes to the outcome of each key, and finds the first change that a unique index refuses.
- `equality` defines which values are equal in PostgreSQL.
"""

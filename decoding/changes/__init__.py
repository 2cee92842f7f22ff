"""PostgreSQL's rules for changes as functions of Arrow batches, so that all engines produce the same rows.

`columns` defines a change, `decode` turns messages into changes, `transform` applies a subscription's row
filters, and `tally` counts. `net_change` reduces changes to the outcome of each key, and finds the first
change that a unique index refuses. `equality` defines which values are equal in PostgreSQL.
"""

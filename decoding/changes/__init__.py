"""PostgreSQL's rules for changes as functions of Arrow batches, so that every runner gets the same rows.

`columns` defines a change, `decode` turns messages into changes, `transform` applies a subscription's
filters, and `tally` counts. `net_change` reduces changes to the outcome of each key, and finds the first
change that a unique index refuses. `equality` says which values are equal in PostgreSQL.
"""

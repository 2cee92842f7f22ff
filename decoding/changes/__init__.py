"""PostgreSQL's rules for changes, each once, as functions of Arrow batches: every runner gets the same rows.

`columns` defines a change, `decode` turns messages into changes, `transform` applies a subscription's
filters, and `tally` counts. `net_change` reduces changes to the outcome of each key, and finds the first
change that a unique index refuses. `equality` says which values PostgreSQL takes for equal.
"""

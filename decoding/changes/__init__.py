"""What PostgreSQL makes of changes, each rule once, as functions of Arrow batches: whoever runs them gets the same rows.

`columns` says what a change is, `decode` makes changes of messages, `transform` what a subscription gets of them, and `tally`
counts them. `net_change` reduces changes to what becomes of each key, and finds the first change that a unique index refuses.
`equality` says which values PostgreSQL takes for equal.
"""

"""Histories of rows, as `history` of pgsieve.yaml says (`pgsieve.assets.steps.kept_histories`).

`copied` puts the rows of a copy into the change history. `versions` is the table of a replica's rows with their
validity. `repaired` finds replicas whose histories lack repaired rows. `expected` describes what the next run will
do.
"""

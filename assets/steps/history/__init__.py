"""Histories of rows, as `history` of pgsieve.yaml says (`pgsieve.assets.steps.kept_histories`).

`copied` puts the rows of a copy into the change history. `versions` is the table of a replica's rows with their validity.
`repaired` is what a repair does to both. `expected` says in words what comes.
"""

"""Keeps histories of a table's rows, which `history` in pgsieve.yaml chooses (`pgsieve.assets.steps.history_choices`).

There are two kinds: the change history, and the versions of rows (`scd2`), each with the time in which it is valid.
`copied_rows` begins a change history with the rows of a copy. `versions` writes the table of versions; `ends_in_memory` and
`shared_rows` take rows for it from the memory of an apply. `repaired_tables` finds replicas with repaired rows that their
histories lack. `expected_histories` describes the histories that the next run will keep.
"""

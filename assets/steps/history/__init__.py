"""Histories of rows, as `history` of pgsieve.yaml says (`pgsieve.assets.steps.history_choices`).

`copied_rows` writes the rows of a copy to the change history. `versions` is the table of the versions of rows with their
validity. `repaired_tables` finds replicas whose histories lack repaired rows. `expected_histories` describes the
histories that the next run will keep.
"""

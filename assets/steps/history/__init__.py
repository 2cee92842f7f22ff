"""Keeps the histories of a table's rows that the user has chosen: `history` in pgsieve.yaml, or `history_choices`.

There are two kinds of history: the change history, which has all changes of the table; and the versions of rows (`scd2`),
which have the time in which each version is valid.

- `copied_rows` begins a change history with the rows of a copy.
- `versions` writes the table of versions.
- `shared_rows` keeps the rows that a batch (changes that one commit applies) removes from the replica, and where the rows
  are that it adds, so that they need not be read again. `ends_in_memory` ends the versions of the removed rows.
- `repaired_tables` finds replicas in which `check --repair` has corrected rows. Their histories lack the corrections.
- `expected_histories` describes the histories that the next run will keep.
"""

"""The first step: copies tables at an exported snapshot. The publisher evaluates their row filters.

`copy` divides the tables into batches, each with a snapshot of its own. `one_batch` and `one_table` copy them, and
`rows` reads their rows on executors.
"""

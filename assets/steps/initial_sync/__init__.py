"""The first step: tables are copied at an exported snapshot. The publisher evaluates their row filters.

`copy` divides the tables into batches, `one_batch` and `one_table` copy them, `rows` reads rows on executors.
"""

"""Row filters as Spark columns: `condition` compiles the tree that `pgsieve.decoding.row_filters` makes.

The other modules are its values, functions, numbers and times, and Python where Spark has no such expression.
"""

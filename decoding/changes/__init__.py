"""What changes do to a table's rows: PostgreSQL's rules, each once, over columns of Arrow and NumPy.

`net_change` reduces changes to what becomes of each key, and finds the first change that a unique index refuses. `equality`
says which values PostgreSQL takes for equal.
"""

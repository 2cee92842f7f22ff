"""Row filters: parses the text of a WHERE clause into a typed tree, or refuses it, and evaluates the tree.

`analysis` parses the text as the server does, with PostgreSQL's rules on types, functions and constants from
the other modules. `evaluation` gives a verdict on each row.

PostgreSQL documentation, Row Filters.
"""

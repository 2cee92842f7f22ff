"""Row filters: parses the text of a WHERE clause into a typed tree, and evaluates the tree for each row.

`analysis` parses the text as the server does, or refuses it if pgsieve cannot evaluate it exactly. It uses
PostgreSQL's rules on types, functions and constants from the other modules. `evaluation` decides for each row
whether the row matches.

PostgreSQL documentation, Row Filters.
"""

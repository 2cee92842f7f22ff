"""pgsieve's own small tables, one module each: sync states, cuts, catalogs, prepared transactions, failures.

Each is a class that knows the table's path, columns and rows, and documents which steps write it.
"""

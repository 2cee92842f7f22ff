"""pgsieve's own small tables, a module each: sync states, cuts, catalogs, what is prepared, what failed.

Each is an object that knows its path, its columns and its rows, and says who writes them.
"""

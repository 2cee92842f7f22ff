"""pgsieve's own small tables, a module each: sync states, cuts, catalogs, what is prepared, what failed.

`columns` holds the columns of all of them and of the change log.
"""

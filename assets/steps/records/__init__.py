"""pgsieve's record tables in the lake, one module each: sync states, cuts, catalogs, prepared transactions and others.

The class of a table has its path, its columns and its rows. The docstring of the class says which steps write it.
"""

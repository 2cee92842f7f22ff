"""pgsieve's record tables in the lake, one module each: sync states, cuts, catalogs, prepared transactions and others.

The class of a table has its path, columns and rows; its docstring says which steps write it.
"""

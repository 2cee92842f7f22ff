"""pgsieve's record tables in the lake, one module each: sync states, cuts, catalogs, prepared transactions and others.

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.

The class of a table has its path, and reads and writes its rows. The docstring of the module or of the class says which
steps write it.
"""

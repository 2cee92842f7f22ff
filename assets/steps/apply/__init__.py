"""The fourth step: changes of a partition root or a table become one commit of its replica, then a cut.

`pgsieve.decoding.changes.net_change` decides what becomes of each key, `multiset` where there is none. `by_files` writes it as files;
`in_process` and `writer` merge where a table takes none.
"""

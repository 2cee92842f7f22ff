"""The fourth step: changes of a partition root or a table become one commit of its replica, then a cut.

`pgsieve.decoding.changes.net_change` decides the outcome for each key, `multiset` for tables without a key.
`by_files` writes the outcome as files. `in_process` and `writer` merge it into tables whose files pgsieve
cannot write.
"""

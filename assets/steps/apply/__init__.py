"""The fourth step: the changes of each table become one commit of its replica; then a cut is written.

`pgsieve.decoding.changes.net_change` computes the net change of each key, `multiset` that of a table without a key.
`by_files` writes it as files, `by_key_parts` that of many changes. `in_process` and `writer` merge it into tables whose files pgsieve cannot write.
"""

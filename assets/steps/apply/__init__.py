"""The fourth step: the changes of each table become one commit of its replica; then a cut is written.

A replica is the copy of one of the publisher's tables in the lake. A cut is an LSN, and for each replica the Delta
version that has exactly the changes before this LSN.

`pgsieve.decoding.changes.net_change` computes the net change of each key: what all changes of the key do together.
`pgsieve.decoding.changes.multiset` computes the net change of a table without a key. `by_files` writes a net change as
files; `by_key_parts` does the same for very many changes. pgsieve cannot write the files of some tables: `in_process`
(delta-rs) and `writer` (Spark) merge the net change into these.
"""

"""Everything that talks to a PostgreSQL server: sessions, the catalog, the slot, snapshots, and streaming replication.

`source` opens the sessions. `catalog` reads tables and publications. `snapshot` exports the snapshots of initial
copies. A run reads the slot by peeks (queries that read a slot and confirm nothing), and confirms it by
`confirmation.confirm`. A run with `--follow` reads and confirms it by `stream.ReplicationStream`.
"""

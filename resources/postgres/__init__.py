"""A PostgreSQL server: its sessions (`source`), its catalog, its slot, exported snapshots, and streaming replication.

After a peek `slot.advance` confirms the slot. While a run follows the source,
`stream.ReplicationStream.confirm` does.
"""

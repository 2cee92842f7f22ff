"""A PostgreSQL server: its catalog (`source`), its slot, exported snapshots, and streaming replication.

`slot.advance` confirms the slot after a peek. `stream.ReplicationStream.confirm` confirms it while a run
follows the source.
"""

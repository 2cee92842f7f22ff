"""A PostgreSQL server: its catalog (`source`), its slot, exported snapshots, and streaming replication.

The slot is read and confirmed in `slot`, or by `stream` and `receiver` while a run follows the source.
"""

"""Replication as software-defined assets, thin over `pgsieve.assets.steps`.

In the order of the data: `initial_sync`, `slot_consumption`, `update_transformation`, `partition_roots`, which are the
replicas; beside them `checks` and `maintenance`.
"""

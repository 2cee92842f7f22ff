"""The Dagster assets of replication: thin layers over the functions of `pgsieve.assets.steps`.

Data passes through `initial_sync`, `slot_consumption`, `update_transformation` and `partition_roots`, in this
order. The last one makes the replica tables. `checks` and `maintenance` are assets beside these steps.
"""

"""The Dagster assets of replication. They are thin layers over the functions of `pgsieve.assets.steps`.

Changes pass through the assets of `initial_sync`, `slot_consumption`, `update_transformation` and `partition_roots`, in
this order. The last one makes the replicas, the copies of the publisher's tables. Beside these steps, `maintenance` has
assets, and `checks` has asset checks.
"""

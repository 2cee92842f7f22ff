"""The changes that publications send: tables, columns, operations, and the relation of each change.

`catalog` (`find_publish_as_relation`) resolves `publish_via_partition_root` for one table, `routing` for all
relations whose changes are read from a slot. `update_transformation` has the rules of an UPDATE under a row filter.
"""

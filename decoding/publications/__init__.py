"""The changes that a publication sends: tables, columns, operations, and the relation they are published as.

`update_transformation` is the truth table of PostgreSQL documentation 29.4.3. `catalog` (`published_as`)
resolves `publish_via_partition_root` for one table, `routing` for all relations that a slot captures.
"""

"""What a publication sends: tables, columns, operations, and as which relation (`publish_via_partition_root`).

`update_transformation` is the truth table of PostgreSQL documentation 29.4.3. `catalog` (`published_as`) resolves
`publish_via_partition_root` for one table, `routing` for all relations that a slot captures.
"""

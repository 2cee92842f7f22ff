"""What a publication sends: tables, columns, operations, and as which relation (`publish_via_partition_root`).

`update_transformation` is the table of PostgreSQL documentation 29.4.3; `catalog` and `routing` resolve the roots.
"""

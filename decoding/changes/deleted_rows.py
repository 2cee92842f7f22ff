"""The metadata of deleted rows that a replica keeps.

A module without pyarrow, which pgsieve.yaml's reader need not load.
"""

#: The kind of metadata that says whether a row is deleted.
DELETED = "deleted"
#: The metadata of deleted rows, and the default names of these columns.
OF_KEPT = {DELETED: "_deleted", "filtered": "_filtered", "deleted_at": "_deleted_at"}

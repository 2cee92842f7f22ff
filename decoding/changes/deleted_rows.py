"""The metadata of deleted rows that a replica keeps; in a module of its own, as reading pgsieve.yaml needs no pyarrow."""

#: The kind of metadata that says whether a row is deleted.
DELETED = "deleted"
#: The metadata of deleted rows, and the default names of these columns.
OF_KEPT = {DELETED: "_deleted", "filtered": "_filtered", "deleted_at": "_deleted_at"}

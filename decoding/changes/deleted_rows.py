"""The metadata of deleted rows that a replica retains.

The code that reads pgsieve.yaml imports this module, and each command runs that code. So the module does not import
pyarrow, which would delay each command.
"""

#: The kind of the metadata column that marks deleted rows.
DELETED = "deleted"
#: Maps each kind of metadata of deleted rows to the default name of its column.
DELETED_ROW_COLUMNS = {DELETED: "_deleted", "filtered": "_filtered", "deleted_at": "_deleted_at"}

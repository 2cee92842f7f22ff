"""The metadata of deleted rows that a replica retains.

pgsieve reads pgsieve.yaml with this module. It does not import pyarrow, because that would take time in each command.
"""

#: The kind of the metadata column that marks deleted rows.
DELETED = "deleted"
#: Maps each kind of metadata of deleted rows to the default name of its column.
DELETED_ROW_COLUMNS = {DELETED: "_deleted", "filtered": "_filtered", "deleted_at": "_deleted_at"}

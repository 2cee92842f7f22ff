"""The metadata of deleted rows that a replica retains.

This module does not import pyarrow, so that reading pgsieve.yaml does not either.
"""

#: The kind of the metadata column that marks deleted rows.
DELETED = "deleted"
#: The default names of the columns with metadata of deleted rows, by kind.
DELETED_ROW_COLUMNS = {DELETED: "_deleted", "filtered": "_filtered", "deleted_at": "_deleted_at"}

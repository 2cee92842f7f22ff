"""The third step: messages become changes, which are filtered and transformed as pgoutput does.

PostgreSQL documentation, 29.4.3 UPDATE Transformations. `transform` loops over slices and tables; `changes` decodes on
executors; `schema_changes` follows ALTER TABLE.
"""

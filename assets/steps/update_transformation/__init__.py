"""The third step: decodes messages into changes, and filters and transforms the changes as pgoutput does.

PostgreSQL documentation, 29.4.3 UPDATE Transformations. `transform` loops over slices (parts of the change log) and
tables, `changes` decodes on executors, and `schema_changes` makes replicas follow ALTER TABLE.
"""

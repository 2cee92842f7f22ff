"""The third step: messages become changes, filtered and transformed as PostgreSQL documentation 29.4.3 says.

`transform` goes over slices and tables; `changes` decodes on executors; `schema_changes` follows ALTER TABLE.
"""

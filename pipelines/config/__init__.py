"""The file pgsieve.yaml: its lines (`file`), allowed values (`values`), the configuration (`model`)."""

"""The file pgsieve.yaml: its lines (`file`), the allowed values (`values`), and the whole configuration (`model`)."""

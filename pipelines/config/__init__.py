"""pgsieve.yaml: the file with its lines (`file`), what each value may be (`values`), and all of it (`model`)."""

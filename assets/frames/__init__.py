"""DataFrame -> DataFrame functions: no Dagster, no I/O of their own."""

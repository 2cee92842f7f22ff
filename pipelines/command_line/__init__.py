"""The command `pgsieve`: its arguments and exit codes (`app`, `cli`), and how results are printed (`console`, `reports`)."""

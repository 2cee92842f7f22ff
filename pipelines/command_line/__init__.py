"""The command `pgsieve`: arguments and exit codes (`cli`), and the output of results (`console`)."""

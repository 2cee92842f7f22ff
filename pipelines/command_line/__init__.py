"""The command `pgsieve`: arguments and exit codes (`cli`), and how results look (`console`)."""

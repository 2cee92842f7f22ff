"""`pgsieve demo`: an embedded server, its replicas, and a comparison; with `--ui`, a demo that runs until it is stopped."""

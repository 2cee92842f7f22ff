"""`pgsieve demo`: an embedded server, its replicas, and a comparison; with `--ui` until it is stopped."""

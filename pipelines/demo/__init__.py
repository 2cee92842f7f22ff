"""`pgsieve demo`: a server, a subscription and its replica to look at, once or until it is stopped."""

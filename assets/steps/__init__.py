"""The steps of replication, each a function over resources and frames, without an orchestrator."""

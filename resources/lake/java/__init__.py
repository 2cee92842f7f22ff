"""Java: `jvm` starts the JVM of a session, and `login` is the agent that gives Hadoop a user without a name."""

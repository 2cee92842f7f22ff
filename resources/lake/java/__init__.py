"""Java: `jvm` starts the JVM of a session, and `login` is the agent that tells Hadoop of a user without a name."""

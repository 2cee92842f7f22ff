"""Java: `jvm` starts the JVM of a session, `class_archive` makes it start faster, `login` helps users without a user name."""

"""Java: `jvm` starts a session's JVM, `class_archive` speeds up its start, `login` names a user without a name."""

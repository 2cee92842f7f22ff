"""The user of a JVM whose user id has no name: an agent of Java's, and the jar made of it.

Out: the jar's path. What it does stands in its source, `LoginUser.java`; `make java` compiles it.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

SOURCE = _FOLDER / "LoginUser.java"
AGENT = _FOLDER / "pgsieve-login.jar"

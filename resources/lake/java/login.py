"""The user of a JVM whose user id has no name: a Java agent, and the jar made of it.

Out: the jar's path. Its source is `LoginUser.java`; `make java` compiles it.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

SOURCE = _FOLDER / "LoginUser.java"
AGENT = _FOLDER / "pgsieve-login.jar"

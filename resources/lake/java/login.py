"""Provides a Java agent that gives Hadoop a user name if the user id has no name.

Out: the path of the agent's jar. Its source is `LoginUser.java`, which `make java` compiles.
"""

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

SOURCE = _FOLDER / "LoginUser.java"
AGENT = _FOLDER / "pgsieve-login.jar"

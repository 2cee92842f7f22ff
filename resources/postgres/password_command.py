"""Reads a password from a command, which the user names as `password_command` in pgsieve.yaml.

In: the command and its arguments.
Out: the first line that it prints.

Raises PasswordCommandError if it prints no password in time. No message shows its output or its arguments.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from pgsieve.decoding.errors import PgsieveError

#: How long a password command may take. It may have to request the password from a server.
PASSWORD_SECONDS = 30.0


class PasswordCommandError(PgsieveError):
    """The password command printed no password."""


def read_printed_password(command: Sequence[str]) -> str:
    """The first line that a command prints. Raises PasswordCommandError."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the administrator's own, from pgsieve.yaml
            command,
            # The command may need the session token of S3. `lake.stores.storage.hide_token` may have removed the token
            # from the environment of the process, but os.environ still has it.
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a command"
        raise _make_command_error(f"cannot be run: {reason}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=PASSWORD_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise _make_command_error(f"did not end within {PASSWORD_SECONDS:g} s") from None
        except BaseException:
            _kill(process)
            raise
    if process.returncode:
        raise _make_command_error(f"ended with status {process.returncode}")
    try:
        lines = output.decode().splitlines()
    except UnicodeDecodeError:
        raise _make_command_error("printed bytes that are not UTF-8") from None
    if not lines or not lines[0] or "\0" in lines[0]:
        raise _make_command_error("printed no password")
    return lines[0]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _make_command_error(reason: str) -> PasswordCommandError:
    return PasswordCommandError(
        f"its password_command {reason}",
        hint="run the command by hand as the same user; it must print the password, and end with status 0",
    )

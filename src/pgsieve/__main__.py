"""`python -m pgsieve`, and the console script: the command line."""

import signal


def main() -> None:
    """Run the command that this process's arguments name, and exit with the command's exit code."""
    # An interrupt waits until the command runs, which says what it leaves (`command` of `app`). During the imports it
    # would print a traceback, or nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from pgsieve.pipelines.command_line import cli

    cli.main()


if __name__ == "__main__":
    main()

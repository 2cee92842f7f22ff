"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr, and the
exit codes of `app`. The modules of commands register them, in the order in which `--help` lists them.
"""

from pgsieve.pipelines.command_line.app import app

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, operation  # noqa: F401


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="pgsieve")


if __name__ == "__main__":
    main()

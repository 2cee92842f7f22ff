"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr, and the
exit codes of `app`. The modules of commands register them, in the order in which `--help` lists them.
"""

import gc

from pgsieve.pipelines.command_line.app import app

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, operation  # noqa: F401

#: New containers until Python looks for cycles. What Dagster, pyarrow and pandas make as they are imported stays: with Python's
#: 700 each command went through it again and again, for a tenth of the processor time of one with nothing to do.
_CONTAINERS = 100_000


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(_CONTAINERS)
    app(prog_name="pgsieve")


if __name__ == "__main__":
    main()

"""`python -m pgsieve`: the command line."""

from pgsieve.pipelines.command_line.cli import main

if __name__ == "__main__":
    main()

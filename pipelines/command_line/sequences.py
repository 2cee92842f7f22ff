"""Prints the sequences in a command's result (`pgsieve.pipelines.commands.sequences`). Nothing here raises an error."""

from collections.abc import Sequence

from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.command_line.console import Text, print_out
from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence


def print_sequences(sequences: Sequence[ListedSequence]) -> None:
    """Print a line for each sequence of a subscription."""
    for each in sequences:
        value = "not read yet" if each.last_value is None else f"{each.last_value}"
        note = "" if each.is_called or each.last_value is None else ", not called yet"
        problem = f": problem: {each.problem}" if each.problem else ""
        print_out(Text(f"sequence {quote_qualified(each.schema, each.name)}: {value}{note}{problem}"))


def print_compared_sequences(sequences: Sequence[CheckedSequence]) -> None:
    """Print a line for each sequence, which says whether the recorded value equals the publisher's value."""
    for each in sequences:
        result = "moved on" if each.moved else "equal" if each.equal else "differs"
        lake_value, publisher = (
            "none" if value is None else value for value in (each.recorded, each.publisher)
        )
        outcome = each.problem or f"{result}: recorded {lake_value}, publisher {publisher}"
        print_out(Text(f"{each.subscription} sequence {quote_qualified(each.schema, each.name)}: {outcome}"))

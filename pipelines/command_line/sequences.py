"""Prints the sequences in a command's result (`pgsieve.pipelines.commands.sequences`). Nothing here raises an error."""

from collections.abc import Sequence

from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.pipelines.command_line.console import Text, print_out
from pgsieve.pipelines.commands.sequences import CheckedSequence, ListedSequence


def print_sequences(sequences: Sequence[ListedSequence]) -> None:
    """Print a line for each sequence of a subscription."""
    for sequence in sequences:
        value = "not read yet" if sequence.last_value is None else f"{sequence.last_value}"
        note = "" if sequence.is_called or sequence.last_value is None else ", not called yet"
        problem = f": problem: {sequence.problem}" if sequence.problem else ""
        print_out(Text(f"sequence {quote_qualified(sequence.schema, sequence.name)}: {value}{note}{problem}"))


def print_compared_sequences(sequences: Sequence[CheckedSequence]) -> None:
    """Print a line for each sequence, which says whether the recorded value equals the publisher's value."""
    for sequence in sequences:
        result = "moved on" if sequence.moved else "equal" if sequence.equal else "differs"
        lake_value, publisher_value = (
            "none" if value is None else value for value in (sequence.recorded, sequence.publisher)
        )
        outcome = sequence.problem or f"{result}: recorded {lake_value}, publisher {publisher_value}"
        print_out(
            Text(
                f"{sequence.subscription} sequence {quote_qualified(sequence.schema, sequence.name)}: {outcome}"
            )
        )

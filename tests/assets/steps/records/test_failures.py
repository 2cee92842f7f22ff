"""The first failing transaction of a slice, and errors that are not caused by data."""

from __future__ import annotations

from typing import cast

import pytest

from pgsieve.assets.steps.records.failures import (
    add_transaction,
    describe_error,
    find_first_failing_commit,
    is_transient,
)
from pgsieve.assets.steps.records.table_states import add_copy_command
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceUnreachableError

COMMITS = (10, 20, 30, 40, 50)


@pytest.mark.parametrize("culprit", [*COMMITS, None])
def test_the_first_transaction_that_fails_is_found_in_few_tries(culprit: int | None) -> None:
    tried = []

    def fails(lsn: int) -> bool:
        tried.append(lsn)
        return culprit is not None and lsn >= culprit

    assert find_first_failing_commit(COMMITS, fails) == culprit
    assert len(tried) <= 3


def test_a_reason_names_the_transaction_in_the_form_of_skip() -> None:
    assert add_transaction("division by zero", 0x1_0000_0010) == (
        "division by zero, in the transaction finished at 1/10"
    )
    assert add_transaction("division by zero", None) == "division by zero"


def test_a_reason_to_copy_again_names_the_command_for_a_shell() -> None:
    assert add_copy_command("sales", ("public", "My orders"), "its files are missing") == (
        "its files are missing; `pgsieve resync sales 'public.\"My orders\"'` copies the table again"
    )


def test_a_server_that_does_not_answer_is_not_an_error_of_the_table() -> None:
    assert is_transient(SourceUnreachableError("no answer"))
    assert not is_transient(PgsieveError("a value that its column cannot hold"))


def test_an_error_of_a_row_filter_is_reported_with_its_sqlstate() -> None:
    error = FilterValueError("division by zero", sqlstate="22012")
    assert describe_error(cast("Lake", None), error) == "division by zero [22012]"


def test_an_error_without_a_sqlstate_is_reported_without_one() -> None:
    error = NumericError("rounding to more than 2000 digits depends on the server's version")
    assert describe_error(cast("Lake", None), error) == error.message

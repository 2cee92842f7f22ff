"""What an engine raised is told apart: the storage refuses, a file is missing, or neither."""

from __future__ import annotations

import errno

from resources.lake_errors import missing_file, refusal


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_a_refusal_is_found_among_the_causes() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert refusal(raised_from(RuntimeError("it failed"), raised_from(ValueError(), full))) == errno.ENOSPC
    assert refusal(RuntimeError("it failed")) is None


def test_errors_that_are_each_others_causes_come_to_an_end() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    raised_from(first, raised_from(second, first))
    assert refusal(first) is None
    assert missing_file(second) is None

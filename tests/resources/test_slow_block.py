"""A block that takes long is reported once, while it goes on; a shorter one is not, however it ends."""

from __future__ import annotations

import threading
from contextlib import suppress

from pgsieve.resources.slow_block import report_if_slow

_WAIT_SECONDS = 30.0


def test_a_block_that_takes_long_is_reported_while_it_goes_on() -> None:
    reported = threading.Event()
    with report_if_slow(0.01, reported.set):
        assert reported.wait(_WAIT_SECONDS)


def test_a_block_that_ends_or_fails_sooner_is_not_reported_and_leaves_no_timer() -> None:
    before, reported = set(threading.enumerate()), threading.Event()
    with report_if_slow(0.2, reported.set):
        pass
    with suppress(ValueError), report_if_slow(0.2, reported.set):
        raise ValueError
    for timer in set(threading.enumerate()) - before:
        timer.join(_WAIT_SECONDS)
    assert not reported.is_set()

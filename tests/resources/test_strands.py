"""Strands of work: one strand works at a time, with all of its threads. Another one works once all of them wait."""

from __future__ import annotations

from contextvars import copy_context
from threading import Event, Thread

from pgsieve.resources.strands import Strand, TicketLock, count_as_waiting, count_as_working
from tests.fixtures.oracle import wait_until

_SECONDS = 60


def test_a_strand_works_only_while_others_wait() -> None:
    lock, events = TicketLock(), list[str]()
    began, answered, other_worked = Event(), Event(), Event()

    def first() -> None:
        with Strand(lock).enter():
            events.append("first begins")
            with count_as_waiting():
                began.set()
                answered.wait(_SECONDS)
            # The other strand has to end first.
            assert other_worked.is_set()
            events.append("first ends")

    def other() -> None:
        began.wait(_SECONDS)
        with Strand(lock).enter():
            events.append("other begins")
            answered.set()
            # The first strand wants to continue.
            wait_until(lambda: lock._request_count == 3, lambda: "it does not ask for the lock")
            events.append("other ends")
            other_worked.set()

    threads = [Thread(target=first), Thread(target=other)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(_SECONDS)
    assert events == ["first begins", "other begins", "other ends", "first ends"]
    assert not lock.is_taken


def test_a_strand_has_the_turn_as_long_as_one_of_its_threads_works() -> None:
    lock, waits, works = TicketLock(), Event(), Event()
    ends = {"waits": Event(), "works": Event()}

    def one_that_waits() -> None:
        with count_as_working(), count_as_waiting():
            waits.set()
            ends["waits"].wait(_SECONDS)

    def one_that_works() -> None:
        with count_as_working():
            works.set()
            ends["works"].wait(_SECONDS)

    with Strand(lock).enter():
        threads = [Thread(target=copy_context().run, args=(act,)) for act in (one_that_waits, one_that_works)]
        with count_as_waiting():
            for each, begun in zip(threads, (waits, works), strict=True):
                each.start()
                begun.wait(_SECONDS)
            assert lock.is_taken
            ends["works"].set()
            threads[1].join(_SECONDS)
            assert not lock.is_taken
            ends["waits"].set()
            threads[0].join(_SECONDS)
        assert lock.is_taken
    assert not lock.is_taken


def test_strands_get_the_turn_in_the_order_in_which_they_ask() -> None:
    lock, worked = TicketLock(), list[int]()

    def work(number: int) -> None:
        with Strand(lock).enter():
            worked.append(number)

    with Strand(lock).enter():
        threads = [Thread(target=work, args=(number,)) for number in range(8)]
        for number, each in enumerate(threads, 2):
            each.start()
            wait_until(
                lambda asked=number: lock._request_count == asked, lambda: "it does not ask for the lock"
            )
    for each in threads:
        each.join(_SECONDS)
    assert worked == list(range(8))


def test_outside_of_a_strand_there_is_no_turn() -> None:
    with count_as_working(), count_as_waiting():
        pass

"""Prefetch: the same items in the same order, made while the caller works. The caller gets errors, and no thread remains."""

import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from pgsieve.resources.prefetch import prefetch

VARIABLE: ContextVar[str] = ContextVar("variable", default="")


def test_all_items_come_in_order() -> None:
    with prefetch(range(1000), 3) as items:
        assert list(items) == list(range(1000))


def test_the_number_of_prefetched_items_is_limited() -> None:
    made, third = list[int](), threading.Event()

    def items() -> Iterator[int]:
        for number in range(10):
            made.append(number)
            if number == 3:
                third.set()
            yield number

    with prefetch(items(), 2) as coming:
        assert next(coming) == 0
        assert third.wait(10), "a third item is not made while two wait"
        assert made == [0, 1, 2, 3]
        assert list(coming) == list(range(1, 10))


def test_an_error_of_an_item_comes_after_the_earlier_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no space left on device")

    with prefetch(items()) as coming:
        assert next(coming) == 1
        with pytest.raises(OSError, match="no space left"):
            next(coming)


def test_leaving_early_ends_the_thread_and_makes_no_further_item() -> None:
    made = list[int]()

    def items() -> Iterator[int]:
        for number in range(1_000_000):
            made.append(number)
            yield number

    before = set(threading.enumerate())
    with prefetch(items()) as coming:
        assert next(coming) == 0
    # Threads of other tests may have ended meanwhile.
    assert set(threading.enumerate()) <= before
    count = len(made)
    assert count < 1000
    assert len(made) == count


def test_items_are_made_in_the_context_of_the_caller() -> None:
    token = VARIABLE.set("the caller's")
    try:
        with prefetch(VARIABLE.get() for _ in range(2)) as items:
            assert list(items) == ["the caller's"] * 2
    finally:
        VARIABLE.reset(token)

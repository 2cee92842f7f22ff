"""Threads share the settings of a session, so blocks with other settings wait for each other. No JVM."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.held_settings import hold_settings

#: No block of this test takes so many seconds.
_LONG = 30.0


class _Settings(dict[str, str]):
    """The settings of a session. The one named `lost` fails in a method."""

    def __init__(self, lost_method: str = "") -> None:
        super().__init__()
        self._lost_method = lost_method

    def unset(self, name: str) -> None:
        if (self._lost_method, name) == ("unset", "lost"):
            raise ConnectionError
        self.pop(name, None)

    def set(self, name: str, value: str) -> None:
        if (self._lost_method, name) == ("set", "lost"):
            raise ConnectionError
        self[name] = value


def test_only_blocks_with_the_same_settings_run_at_the_same_time() -> None:
    session = Mock(SparkSession, conf=_Settings())
    began, may_end = Event(), Event()

    def hold(settings: Mapping[str, str], *, waits: bool = False) -> dict[str, str]:
        with hold_settings(session, settings):
            if waits:
                began.set()
                assert may_end.wait(_LONG)
            return dict(session.conf)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(hold, {"a": "1"}, waits=True)
        assert began.wait(_LONG)
        assert pool.submit(hold, {"a": "1"}).result(_LONG) == {"a": "1"}
        others = [pool.submit(hold, settings) for settings in ({"b": "2"}, {})]
        assert session.conf == {"a": "1"}
        assert not any(other.done() for other in others)
        may_end.set()
        assert [first.result(_LONG), *(other.result(_LONG) for other in others)] == [
            {"a": "1"},
            {"b": "2"},
            {},
        ]
    assert session.conf == {}


@pytest.mark.parametrize("lost_method", ["set", "unset"])
def test_a_block_whose_session_is_lost_lets_waiting_blocks_go_on(lost_method: str) -> None:
    session = Mock(SparkSession, conf=_Settings(lost_method))
    began, may_end = Event(), Event()

    def lose_session() -> None:
        with hold_settings(session, {"lost": "1"}):
            began.set()
            assert may_end.wait(_LONG)

    def hold_other() -> None:
        with hold_settings(session, {"b": "2"}):
            pass

    with ThreadPoolExecutor(2) as pool:
        lost = pool.submit(lose_session)
        if lost_method == "unset":
            assert began.wait(_LONG)
        other = pool.submit(hold_other)
        Timer(0.1, may_end.set).start()
        with pytest.raises(ConnectionError):
            lost.result(_LONG)
        other.result(_LONG)

"""When a follower counts as stalled, by a clock that the tests move."""

from __future__ import annotations

import pytest

from pgsieve.pipelines.following import watch
from pgsieve.pipelines.following.watch import SlotStreamActivity, StalledError, Watch
from pgsieve.resources.postgres.errors import SourceSilentError, SourceUnreachableError


class _Clock:
    """Stands for `time` in the module under test."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class _Stream:
    """A stream that is connected and has received nothing for long."""

    position = received_bytes = 0
    waiting_since = None

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    @property
    def answered_at(self) -> float:
        return self._clock.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(watch, "time", clock)
    return clock


@pytest.mark.parametrize("limit", [6.0, 1800.0])
def test_wal_that_arrives_after_an_idle_time_is_no_stall_until_it_stays_unsent(
    clock: _Clock, limit: float
) -> None:
    unsent = False
    watched = Watch(limit, lambda _: unsent)
    activity = SlotStreamActivity(
        "shop", "slot", stream=_Stream(clock), is_exempt=False, last_progress_at=clock.now
    )
    watched.add(activity)
    watched.check()
    clock.now += 2 * limit
    watched.check()
    unsent = True
    watched.check()
    clock.now += min(limit, 30.0) - 1
    watched.check()
    activity.note_progress()
    watched.check()
    clock.now += limit
    watched.check()
    clock.now += min(limit, 30.0)
    with pytest.raises(StalledError, match="the server has WAL that it does not send"):
        watched.check()


def test_a_server_that_refuses_is_not_silent_and_one_that_times_out_is(clock: _Clock) -> None:
    watched, stream = Watch(1800.0, lambda _: False), _Stream(clock)
    activity = SlotStreamActivity("shop", "slot")
    watched.add(activity)
    with activity.record_reading(stream):
        clock.now += 10
        assert watched.read_health().status == "ok"
    for error, seconds, status in (
        (SourceSilentError("no connection"), 200.0, "ok"),
        (SourceUnreachableError("refused"), 0.0, "ok"),
        (SourceSilentError("no connection"), 299.0, "ok"),
        (SourceSilentError("no connection"), 2.0, "silent"),
        (SourceUnreachableError("refused"), 0.0, "ok"),
        (SourceSilentError("no connection"), 301.0, "silent"),
    ):
        activity.note_error(error)
        clock.now += seconds
        assert watched.read_health().status == status
    with activity.record_reading(stream):
        assert watched.read_health().status == "ok"

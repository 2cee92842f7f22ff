"""How `pgsieve read` prints values that JSON, Arrow or Python does not have."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest

from pgsieve.decoding.values.datetimes import DATE_INFINITY, TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY
from pgsieve.pipelines.command_line.rows import print_rows

#: A day that Arrow does not print.
LATE_DAY = 2_145_031_948
DAY = 86_400_000_000


def printed(capfd: pytest.CaptureFixture[str], array: pa.Array, *, as_json: bool) -> list[Any]:
    batch = pa.record_batch({"v": array})
    print_rows(iter([batch]), batch.schema, as_json=as_json)
    lines = capfd.readouterr().out.splitlines()
    if as_json:
        return [json.loads(line, parse_constant=pytest.fail)["v"] for line in lines]
    return lines[1:]


def test_json_has_words_for_numbers_that_it_does_not_have(capfd: pytest.CaptureFixture[str]) -> None:
    numbers = [math.nan, math.inf, -math.inf, 1.5, None]
    words = ["NaN", "Infinity", "-Infinity", 1.5, None]
    assert printed(capfd, pa.array(numbers), as_json=True) == words
    (inner,) = printed(capfd, pa.array([[numbers, None, []]]), as_json=True)
    assert json.loads(inner, parse_constant=pytest.fail) == [words, None, []]


@pytest.mark.parametrize("as_json", [True, False])
def test_late_and_infinite_moments_are_printed_as_postgresql_does(
    capfd: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    null = None if as_json else ""

    def texts(array: pa.Array) -> list[Any]:
        return [
            line if as_json or not line else line[1:-1] for line in printed(capfd, array, as_json=as_json)
        ]

    days = pa.array([0, 2_932_897, LATE_DAY, DATE_INFINITY, None], pa.date32())
    assert texts(days) == ["1970-01-01", "10000-01-01", "5874868-01-01", "infinity", null]
    moments = pa.array(
        [0, 3_000_000 * DAY, 50_000_000 * DAY, TIMESTAMP_INFINITY, TIMESTAMP_MINUS_INFINITY, None]
    )
    assert texts(moments.cast(pa.timestamp("us"))) == [
        "1970-01-01 00:00:00",
        "10183-09-21 00:00:00",
        "138865-05-08 00:00:00",
        "infinity",
        "-infinity",
        null,
    ]
    assert texts(moments.cast(pa.timestamp("us", "UTC")))[2] == "138865-05-08 00:00:00+00"


def test_arrays_have_any_moment_and_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    def inner(values: list[Any], element_type: pa.DataType) -> Any:
        array = pa.array([values, None], pa.list_(element_type))
        first, second = printed(capfd, array, as_json=True)
        assert second is None
        return json.loads(first)

    assert inner([0, 2_932_897, DATE_INFINITY, None], pa.date32()) == [
        *("1970-01-01", "10000-01-01", "infinity"),
        None,
    ]
    assert inner([0, TIMESTAMP_INFINITY], pa.timestamp("us", "UTC")) == [
        "1970-01-01 00:00:00+00",
        "infinity",
    ]
    assert inner([b"\x00a", None], pa.binary()) == ["\\x0061", None]

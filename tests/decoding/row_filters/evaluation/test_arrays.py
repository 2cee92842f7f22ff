"""NULL among the elements of arrays."""

from __future__ import annotations

from pgsieve.decoding.row_filters.evaluation.arrays import ARRAY_FUNCTIONS, RANK_OPERATORS, find_position


def test_null_equals_no_element() -> None:
    assert RANK_OPERATORS["arraycontains"]([1, None], [1, 1])
    assert not RANK_OPERATORS["arraycontains"]([1, None], [None])
    assert RANK_OPERATORS["arraycontains"]([], [])
    assert RANK_OPERATORS["arraycontained"]([2], [1, 2])
    assert not RANK_OPERATORS["arrayoverlap"]([None], [None])
    assert RANK_OPERATORS["arrayoverlap"]([None, 1], [1])


def test_array_position_finds_null() -> None:
    assert (find_position([1, None, None], None), find_position([1, 2, 2], 2), find_position([], 1)) == (
        2,
        2,
        None,
    )


def test_an_empty_array_has_no_dimension() -> None:
    names = ("array_cardinality", "array_length", "array_lower", "array_ndims")
    first = [(), (1,), (1,), ()]
    assert [ARRAY_FUNCTIONS[name]([], *of) for name, of in zip(names, first, strict=True)] == [
        0,
        None,
        None,
        None,
    ]
    assert [ARRAY_FUNCTIONS[name]([None, 5], *of) for name, of in zip(names, first, strict=True)] == [
        2,
        2,
        1,
        1,
    ]
    assert [ARRAY_FUNCTIONS[name]([5], other) for name in names[1:3] for other in (0, 2, -1)] == [None] * 6

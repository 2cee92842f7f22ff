"""Functions of arrays of one dimension in row filters.

In: lists, with None for NULL; functions that compare elements take their ranks (`values.rank_function`). Out:
PostgreSQL's value (arrayfuncs.c, array_userfuncs.c). Raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

Ranks = Sequence[Any]


def _length(items: Sequence[Any], dimension: int) -> int | None:
    return (len(items) or None) if dimension == 1 else None


def _lower(items: Sequence[Any], dimension: int) -> int | None:
    return 1 if items and dimension == 1 else None


def _dimensions(items: Sequence[Any]) -> int | None:
    return 1 if items else None


def _contains(whole: Ranks, part: Ranks) -> bool:
    """`whole @> part`; NULL equals no element."""
    return all(item is not None and item in whole for item in part)


def _overlap(left: Ranks, right: Ranks) -> bool:
    """`left && right`."""
    return any(item is not None and item in left for item in right)


def position(items: Ranks, sought: Any) -> int | None:
    """The position, from 1, of the first element equal to `sought`, which may be NULL.

    None if there is none.
    """
    return next((place for place, item in enumerate(items, 1) if item == sought), None)


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "array_cardinality": len,
        "array_length": _length,
        "array_lower": _lower,
        "array_ndims": _dimensions,
    }
)
"""Functions of an array, by the name that `pgsieve.decoding.row_filters.functions` gives them."""

RANK_OPERATORS: Final[Mapping[str, Callable[[Ranks, Ranks], bool]]] = MappingProxyType(
    {
        "arraycontains": _contains,
        "arraycontained": lambda part, whole: _contains(whole, part),
        "arrayoverlap": _overlap,
    }
)
"""Operators of two arrays, given as the ranks of their elements."""

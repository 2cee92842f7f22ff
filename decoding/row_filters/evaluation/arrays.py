"""PostgreSQL's functions of arrays of one dimension, for row filters.

In: lists, with None for NULL. Functions that compare elements take the ranks of the elements instead: objects that have
the order of the elements in PostgreSQL (`values.rank_function`). Out: the value that PostgreSQL's function returns
(arrayfuncs.c, array_userfuncs.c). Raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

Ranks = Sequence[Any]


def _find_length(items: Sequence[Any], dimension: int) -> int | None:
    return (len(items) or None) if dimension == 1 else None


def _find_lower_bound(items: Sequence[Any], dimension: int) -> int | None:
    return 1 if items and dimension == 1 else None


def _count_dimensions(items: Sequence[Any]) -> int | None:
    return 1 if items else None


def _contains(container: Ranks, contained: Ranks) -> bool:
    """Return `container @> contained`; NULL equals no element, not even another NULL."""
    return all(item is not None and item in container for item in contained)


def _overlap(left: Ranks, right: Ranks) -> bool:
    """Return `left && right`: whether the arrays share an element."""
    return any(item is not None and item in left for item in right)


def find_position(items: Ranks, sought_item: Any) -> int | None:
    """Return the position of the first element that equals `sought_item`, or None; positions count from 1.

    `sought_item` may be NULL. In that case NULL equals NULL.
    """
    return next((index for index, item in enumerate(items, 1) if item == sought_item), None)


ARRAY_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "array_cardinality": len,
        "array_length": _find_length,
        "array_lower": _find_lower_bound,
        "array_ndims": _count_dimensions,
    }
)
"""The functions of an array, by the name that `pgsieve.decoding.row_filters.functions` gives them."""

RANK_OPERATORS: Final[Mapping[str, Callable[[Ranks, Ranks], bool]]] = MappingProxyType(
    {
        "arraycontains": _contains,
        "arraycontained": lambda part, whole: _contains(whole, part),
        "arrayoverlap": _overlap,
    }
)
"""The operators of two arrays; the functions take the ranks of the elements."""

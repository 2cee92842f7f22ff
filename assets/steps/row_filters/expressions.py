"""Forms that the Columns of a row filter are made of. In and out: Columns. Raises nothing."""

from collections.abc import Callable, Iterable
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812


def chosen(branches: Iterable[tuple[Column, Column]], default: Column) -> Column:
    """CASE WHEN … THEN … ELSE."""
    (first, *rest) = branches
    case = reduce(lambda built, branch: built.when(*branch), rest, F.when(*first))
    return case.otherwise(default)


def bound(build: Callable[..., Column], *values: Column) -> Column:
    """Compute each value once, however often `build` uses it: Spark's expressions have no LET."""
    names = [f"v{number}" for number in range(len(values))]
    row = F.struct(*(value.alias(name) for name, value in zip(names, values, strict=True)))
    return F.transform(F.array(row), lambda fields: build(*(fields[name] for name in names))).getItem(0)


def failure(sqlstate: str, message: str) -> Column:
    """Fail the row with PostgreSQL's words."""
    return F.raise_error(F.lit(f"{message} [{sqlstate}]"))

"""Functions of Python values in row filters, one around the other, as Spark calls them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType

from pgsieve.assets.steps.row_filters.python import PythonFunction
from pgsieve.decoding.row_filters.numeric import TO_NUMERIC

REMAINDER, FLOOR = (
    PythonFunction(TO_NUMERIC[name], StringType()) for name in ("numeric_mod", "numeric_floor")
)


@pytest.mark.parametrize(
    ("operands", "value", "error"),
    [(("7.5", "2"), "1", None), (("7.5", None), None, None), (("7.5", "0"), None, "division by zero")],
)
def test_a_function_around_another_takes_its_value_or_error(
    operands: tuple[Any, ...], value: str | None, error: str | None
) -> None:
    """Row by row, as Spark 4.0 does, and by batches, as later versions do."""
    in_row = FLOOR.outcome_in_row(REMAINDER.outcome_in_row(*operands))
    batch = FLOOR.attempted([REMAINDER.attempted([pa.array([each], pa.string()) for each in operands])])
    for outcome in (in_row.asDict(), batch.to_pylist()[0]):
        assert outcome["value"] == value
        assert (outcome["filter_error"] is None) == (error is None)
        assert (error or "") in (outcome["filter_error"] or "")

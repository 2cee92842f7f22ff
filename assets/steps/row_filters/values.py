"""What the values of a row filter are in Spark: their types, constants, and elements as they are compared."""

from datetime import date, datetime
from decimal import Decimal
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from pgsieve.assets.steps.row_filters import datetimes
from pgsieve.assets.steps.row_filters.numbers import numeric_order
from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.nodes import Digits, Node
from pgsieve.decoding.values.builtin_types import ELEMENTS

_TYPES: Final[dict[int, DataType]] = {
    nodes.BOOL: BooleanType(),
    nodes.BYTEA: BinaryType(),
    nodes.INT2: ShortType(),
    nodes.INT4: IntegerType(),
    nodes.INT8: LongType(),
    nodes.FLOAT4: FloatType(),
    nodes.FLOAT8: DoubleType(),
    nodes.DATE: DateType(),
    nodes.TIMESTAMP: TimestampNTZType(),
    nodes.TIMESTAMPTZ: TimestampType(),
    nodes.INTERVAL: datetimes.INTERVAL_TYPE,
}  # and strings, for the rest


def spark_type(node: Node) -> DataType:
    """Return the type of a node's values."""
    return value_type(node.type_oid, node.digits)


def value_type(type_oid: int, digits: Digits | None) -> DataType:
    """Return the type of values of a PostgreSQL type, with these digits where it is numeric or an array of it."""
    if type_oid in ELEMENTS:
        return ArrayType(value_type(ELEMENTS[type_oid], digits))
    if type_oid == nodes.NUMERIC:
        return decimal_type(digits)
    return _TYPES.get(type_oid, StringType())


def decimal_type(of: Digits | None) -> DataType:
    """Return the type of a numeric: its text where no decimal type holds it."""
    return StringType() if of is None else DecimalType(of.precision, of.scale)


def element_to_compare(element: Column, type_oid: int) -> Column:
    """Return an element as PostgreSQL compares it; numerics by their texts, whatever decimal types they have."""
    if type_oid == nodes.NUMERIC:
        return numeric_order(element.cast(StringType()))
    return F.rtrim(element) if type_oid == nodes.BPCHAR else element


def constant(value: nodes.ConstantValue, node: nodes.Constant) -> Column:
    """Return a constant in the Spark type of its node."""
    result_type = spark_type(node)
    match value:
        case bool() | bytes() | str():
            return F.lit(value)
        case Decimal():
            # By way of text: a Python Decimal's own precision would decide otherwise.
            return F.lit(str(value) if not value.is_finite() else format(value, "f")).cast(result_type)
        case nodes.Infinity() | datetime() | date():
            return datetimes.constant(value, node.type_oid)
        case nodes.Interval():
            return datetimes.compared_interval(value)
        case _:
            return F.lit(value).cast(result_type)

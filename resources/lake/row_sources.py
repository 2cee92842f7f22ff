"""Calls functions of batches with rows that are in files, or that Spark reads.

A function of the rows is the same in both cases. So its caller need not know where the rows are.

In: rows, divided into parts, and a function that gets the rows of a part and yields batches.
Out: what the function yields, in memory or as a DataFrame.

Raises the errors of the function, OSError, and Spark's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.runners import Runner, make_part_frame, record_costs, to_spark_schema
from pgsieve.resources.lake.spark_writes import number_columns
from pgsieve.resources.parts import Guard
from pgsieve.resources.work import name_engine

#: What a source yields, for example batches of rows.
Item_co = TypeVar("Item_co", covariant=True)
#: A function of the rows of a part. It is called on executors.
PartFunction = Callable[[Iterable[Item_co]], Iterable[pa.RecordBatch]]


class RowSource(Protocol[Item_co]):
    """The interface of a source of rows."""

    def read(self) -> Iterator[Item_co]:
        """Yield all rows in this process."""

    def compute(self, function: PartFunction[Item_co], schema: pa.Schema) -> pa.Table:
        """Let executors call a function with the rows of each part. Return all that it yields, with these columns.

        The results have to be few, for example counts, or descriptions of files that the function has written.
        """

    def make_frame(
        self, spark: SparkSession, function: PartFunction[Item_co], schema: StructType | str
    ) -> DataFrame:
        """What a function yields for the rows of each part, as a DataFrame with these columns."""


@dataclass(frozen=True)
class StoredSource(Generic[Item_co]):
    """Rows that this process and executors can read without Spark's reader, for example from files.

    - `parts`: functions that return the rows of a part. A function passes the rows through a guard (`resources.parts`).
    - `runner`: calls the functions of `compute`
    """

    parts: Sequence[Callable[[Guard], Iterable[Item_co]]]
    runner: Runner

    def read(self) -> Iterator[Item_co]:
        """Yield all rows in this process."""
        for read_part in self.parts:
            yield from read_part(iter)

    def compute(self, function: PartFunction[Item_co], schema: pa.Schema) -> pa.Table:
        """Let the runner call a function with the rows of each part, as `RowSource` describes."""
        return self.runner.run(_StoredPart(self.parts, function), len(self.parts), schema=schema)

    def make_frame(
        self, spark: SparkSession, function: PartFunction[Item_co], schema: StructType | str
    ) -> DataFrame:
        """What a function yields for the rows of each part. A task of Spark reads a part."""
        return make_part_frame(spark, _StoredPart(self.parts, function), len(self.parts), schema)


@dataclass(frozen=True)
class _StoredPart(Generic[Item_co]):
    """Calls a function with the rows of a part that has a number."""

    parts: Sequence[Callable[[Guard], Iterable[Item_co]]]
    function: PartFunction[Item_co]

    def __call__(self, number: int, guard: Guard) -> Iterable[pa.RecordBatch]:
        return self.function(self.parts[number](guard))


@dataclass(frozen=True)
class SparkRows(Generic[Item_co]):
    """Rows of a DataFrame, and a function that turns their batches into the items of a source."""

    frame: DataFrame
    convert: Callable[[Iterable[pa.RecordBatch]], Iterable[Item_co]]

    def map_batches(self, function: PartFunction[Item_co], schema: StructType | str) -> DataFrame:
        """What a function yields for the rows of each of Spark's partitions."""
        names, convert = self.frame.columns, self.convert

        def call_function(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from function(
                convert(batch.select(range(len(names))).rename_columns(names) for batch in batches)
            )

        # `mapInArrow` needs a column, and a table may have none.
        frame = self.frame if names else self.frame.select(F.lit(None).cast("boolean"))
        return number_columns(frame).mapInArrow(call_function, schema)


@dataclass(frozen=True)
class SparkSource(Generic[Item_co]):
    """Rows that only Spark can read. A part is a partition of one of the DataFrames."""

    rows: Sequence[SparkRows[Item_co]]

    def read(self) -> Iterator[Item_co]:
        """Yield all rows in this process. Spark sends them to its memory at once."""
        return chain.from_iterable(each.convert(each.frame.toArrow().to_batches()) for each in self.rows)

    def compute(self, function: PartFunction[Item_co], schema: pa.Schema) -> pa.Table:
        """Let Spark call a function with the rows of each part, as `RowSource` describes."""
        if not self.rows:
            return schema.empty_table()
        spark = self.rows[0].frame.sparkSession
        results = self.make_frame(spark, function, to_spark_schema(schema)).toArrow().cast(schema)
        if schema.equals(FILE_SCHEMA):
            record_costs(name_engine(spark), None, results.filter(results["path"].is_valid()))
        return results

    def make_frame(
        self,
        spark: SparkSession,  # noqa: ARG002 - as the protocol has it
        function: PartFunction[Item_co],
        schema: StructType | str,
    ) -> DataFrame:
        """What a function yields for the rows of each part, as a DataFrame with these columns."""
        return reduce(DataFrame.unionByName, (each.map_batches(function, schema) for each in self.rows))

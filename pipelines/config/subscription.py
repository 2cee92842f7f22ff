"""An entry of the section `subscriptions` of pgsieve.yaml: publications of a source, and their replicas in the lake.

Raises errors that become a ConfigError.
"""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    field_validator,
)

from pgsieve.pipelines.config.history import HistoryConfig, expand_short_form
from pgsieve.pipelines.config.identifiers import parse_qualified_name
from pgsieve.pipelines.config.layout import LayoutConfig
from pgsieve.pipelines.config.retention import WaitTime
from pgsieve.pipelines.config.values import (
    ColumnName,
    NonEmptyText,
    ObjectName,
    convert_to_lower_case,
    make_slot_name,
    normalise_streaming,
    refuse_duplicates,
    refuse_empty,
)


class SubscriptionConfig(BaseModel):
    """Publications of one source, replicated into one folder of the lake; see CREATE SUBSCRIPTION."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = ""
    source: str
    publications: Annotated[tuple[ObjectName, ...], AfterValidator(refuse_empty)]
    row_filter: Literal["pipeline", "publisher"] = "pipeline"
    copy_data: bool = True
    origin: Annotated[Literal["any", "none"], BeforeValidator(convert_to_lower_case)] = "any"
    binary: bool = False
    streaming: Annotated[Literal["off", "on", "parallel"], BeforeValidator(normalise_streaming)] = "parallel"
    two_phase: bool = False
    failover: bool = False
    disable_on_error: bool = False
    freshness: WaitTime = timedelta(minutes=15)
    types: dict[ColumnName, NonEmptyText] = {}
    layout: LayoutConfig = LayoutConfig()
    history: Annotated[HistoryConfig, BeforeValidator(expand_short_form)] = HistoryConfig()

    @field_validator("publications")
    @classmethod
    def _refuse_duplicate_publications(cls, publications: tuple[str, ...]) -> tuple[str, ...]:
        refuse_duplicates(publications, "publication")
        return publications

    @field_validator("types")
    @classmethod
    def _refuse_duplicate_columns(cls, types: dict[str, str]) -> dict[str, str]:
        refuse_duplicates((parse_qualified_name(key, 3) for key in types), "column")
        return types

    @property
    def slot(self) -> str:
        """The name of the subscription's own slot, which it has with `row_filter: publisher`."""
        return make_slot_name(self.source, self.name)

    @property
    def type_overrides(self) -> dict[tuple[str, str, str], str]:
        """Maps a schema, table and column to the Spark type of the column in `types`.

        The names are written as in the catalog.
        """
        overrides = {}
        for key, spark_type in self.types.items():
            schema, table, column = parse_qualified_name(key, 3)
            overrides[schema, table, column] = spark_type
        return overrides

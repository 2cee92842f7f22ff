"""Publications that pgsieve.yaml defines, in the mapping `sources.NAME.publications`.

In: such a mapping
Out: a `PublicationConfig`. The fields for options have the names, values and defaults that they have in CREATE
PUBLICATION.

Raises pydantic's errors for invalid values. They have a hint, and do not contain the value.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from pgsieve.pipelines.config.identifiers import parse_qualified_name
from pgsieve.pipelines.config.values import (
    NonEmptyText,
    make_refusal,
    refuse_duplicates,
    refuse_empty,
    split_name,
)

Operation = Literal["insert", "update", "delete", "truncate"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def _check_relation_name(name: str) -> str:
    split_name(name, 2, 'public.orders, "Sales"."Order Lines"')
    return name


#: A schema and a name, written as in SQL.
RelationName = Annotated[str, AfterValidator(_check_relation_name)]


class PublishedTableConfig(_Section):
    """A table of a publication, optionally with a row filter (`where`, in SQL) and a column list."""

    table: RelationName
    where: NonEmptyText | None = None
    columns: Annotated[tuple[str, ...] | None, AfterValidator(refuse_empty)] = None

    @field_validator("columns")
    @classmethod
    def _resolve_columns(cls, columns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Convert names of columns from SQL's notation to the names in the catalog."""
        if columns is None:
            return None
        names = tuple(split_name(column, 1, 'region, "Unit Price"')[0] for column in columns)
        refuse_duplicates(names, "column")
        return names

    @property
    def relation(self) -> tuple[str, str]:
        """The schema and the name of the table, as they are in the catalog."""
        return _parse_relation_name(self.table)


class PublicationConfig(_Section):
    """A publication that pgsieve.yaml defines and the server does not have; see CREATE PUBLICATION."""

    tables: Annotated[tuple[PublishedTableConfig, ...], AfterValidator(refuse_empty)] = ()
    all_tables: bool = False
    excepted_tables: tuple[RelationName, ...] = Field(default=(), alias="except")
    sequences: Annotated[tuple[RelationName, ...], AfterValidator(refuse_empty)] = ()
    all_sequences: bool = False
    publish: frozenset[Operation] = frozenset(OPERATIONS)
    publish_via_partition_root: bool = False
    publish_generated_columns: Literal["none", "stored"] = "none"

    @field_validator("tables")
    @classmethod
    def _refuse_duplicate_tables(
        cls, tables: tuple[PublishedTableConfig, ...]
    ) -> tuple[PublishedTableConfig, ...]:
        refuse_duplicates((table.relation for table in tables), "table")
        return tables

    @field_validator("sequences")
    @classmethod
    def _refuse_duplicate_sequences(cls, sequences: tuple[RelationName, ...]) -> tuple[RelationName, ...]:
        refuse_duplicates(map(_parse_relation_name, sequences), "sequence")
        return sequences

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.tables and self.all_tables:
            raise make_refusal("has `tables` and `all_tables`", "keep one of them")
        if self.sequences and self.all_sequences:
            raise make_refusal("has `sequences` and `all_sequences`", "keep one of them")
        if not (self.tables or self.all_tables or self.sequences or self.all_sequences):
            raise make_refusal(
                "has no tables", "list some: `tables: [{table: …}]`, or publish all: `all_tables: true`"
            )
        if self.excepted_tables and not self.all_tables:
            raise make_refusal(
                "has `except` without `all_tables: true`", "leave the tables out of `tables` instead"
            )
        return self

    @property
    def published_sequences(self) -> tuple[tuple[str, str], ...]:
        """The schemas and names of the listed sequences, as they are in the catalog."""
        return tuple(map(_parse_relation_name, self.sequences))

    @property
    def excluded(self) -> tuple[tuple[str, str], ...]:
        """The schemas and names of the tables in `except`, which `all_tables` leaves out, as they are in the catalog."""
        return tuple(map(_parse_relation_name, self.excepted_tables))


def _parse_relation_name(name: str) -> tuple[str, str]:
    schema, relation = parse_qualified_name(name, 2)
    return schema, relation

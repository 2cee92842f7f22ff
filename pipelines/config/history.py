"""The section `history` of a subscription in pgsieve.yaml: which histories of its rows the lake retains.

In: the section of the file
Out: the choice for each table: whether its change history begins with the rows that were copied (`initial`), and
     whether all versions of each row are retained (`scd2`)

Raises the errors of `values.make_refusal`; the loader of the file turns them into a ConfigError.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.pipelines.config.identifiers import parse_qualified_name
from pgsieve.pipelines.config.values import refuse_duplicates, split_name


def expand_short_form(section: object) -> object:
    """Replace a short form by the section for which it stands.

    `scd2` retains the versions of rows; `off` retains no history.
    """
    if section == "scd2":
        return {"scd2": True}
    return {"initial": False, "scd2": False} if section == "off" else section


class TableHistoryConfig(BaseModel):
    """The histories of one table. If a key is not given, the value of the subscription applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    initial: bool | None = None
    scd2: bool | None = None

    def to_history_choice(self) -> HistoryChoice:
        """Convert to the object that the steps of a run use."""
        return HistoryChoice(self.initial, self.scd2)


class HistoryConfig(TableHistoryConfig):
    """The histories of the tables of a subscription."""

    tables: dict[str, Annotated[TableHistoryConfig, BeforeValidator(expand_short_form)]] = {}

    @field_validator("tables")
    @classmethod
    def _refuse_duplicate_tables(cls, tables: dict[str, TableHistoryConfig]) -> dict[str, TableHistoryConfig]:
        refuse_duplicates(
            (split_name(name, 2, 'public.orders, "Sales"."Order Lines"') for name in tables), "table"
        )
        return tables

    def to_history_choices(self) -> HistoryChoices:
        """Convert to the object that the steps of a run use."""
        tables = {
            parse_qualified_name(name, 2): history.to_history_choice()
            for name, history in self.tables.items()
        }
        return HistoryChoices(
            self.to_history_choice(),
            {(schema, table): history for (schema, table), history in tables.items()},
        )

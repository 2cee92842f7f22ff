"""`history` of a subscription in pgsieve.yaml: which histories of rows the lake retains.

In: the section of the file. Out: the histories of each table. Raises errors that become a ConfigError.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.pipelines.config.identifiers import parse_qualified
from pgsieve.pipelines.config.values import name_parts, refuse_duplicates


def expand_short_form(section: object) -> object:
    """The section for a short form: `scd2` retains the versions of rows, `off` retains no history."""
    if section == "scd2":
        return {"scd2": True}
    return {"initial": False, "scd2": False} if section == "off" else section


class TableHistoryConfig(BaseModel):
    """The histories of one table; for a key that is left out, the subscription's value applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    initial: bool | None = None
    scd2: bool | None = None

    def table_history(self) -> HistoryChoice:
        """The histories in the form of the steps."""
        return HistoryChoice(self.initial, self.scd2)


class HistoryConfig(TableHistoryConfig):
    """The histories of the tables of a subscription."""

    tables: dict[str, Annotated[TableHistoryConfig, BeforeValidator(expand_short_form)]] = {}

    @field_validator("tables")
    @classmethod
    def _refuse_duplicate_tables(cls, tables: dict[str, TableHistoryConfig]) -> dict[str, TableHistoryConfig]:
        refuse_duplicates(
            (name_parts(name, 2, 'public.orders, "Sales"."Order Lines"') for name in tables), "table"
        )
        return tables

    def subscription_histories(self) -> HistoryChoices:
        """The histories in the form of the steps."""
        tables = {parse_qualified(name, 2): each.table_history() for name, each in self.tables.items()}
        return HistoryChoices(self.table_history(), {(s, t): each for (s, t), each in tables.items()})

"""`history` of a subscription in pgsieve.yaml: the histories of rows that are kept.

In: the section of the file. Out: the choice for each table. Raises errors that pydantic turns into a
ConfigError.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

from pgsieve.assets.steps.kept_histories import KeptHistories, KeptHistory
from pgsieve.pipelines.config.identifiers import parse_qualified
from pgsieve.pipelines.config.values import distinct, qualified


def in_full(section: object) -> object:
    """The section for its short forms: `scd2` keeps the versions of rows, `off` keeps no history."""
    if section == "scd2":
        return {"scd2": True}
    return {"initial": False, "scd2": False} if section == "off" else section


class TableHistoryConfig(BaseModel):
    """The histories of one table; for a key that is left out, the subscription's value applies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    initial: bool | None = None
    scd2: bool | None = None

    def kept(self) -> KeptHistory:
        """The choice in the form of the steps."""
        return KeptHistory(self.initial, self.scd2)


class HistoryConfig(TableHistoryConfig):
    """The histories of the tables of a subscription."""

    tables: dict[str, Annotated[TableHistoryConfig, BeforeValidator(in_full)]] = {}

    @field_validator("tables")
    @classmethod
    def _tables_once(cls, tables: dict[str, TableHistoryConfig]) -> dict[str, TableHistoryConfig]:
        distinct((qualified(name, 2, 'public.orders, "Sales"."Order Lines"') for name in tables), "table")
        return tables

    def of_subscription(self) -> KeptHistories:
        """The choice in the form of the steps."""
        tables = {parse_qualified(name, 2): each.kept() for name, each in self.tables.items()}
        return KeptHistories(self.kept(), {(s, t): each for (s, t), each in tables.items()})

"""`catalog` of pgsieve.yaml: which templates are accepted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pgsieve.pipelines.config.catalog import CatalogConfig


def test_names_have_a_default() -> None:
    assert CatalogConfig().names == "{subscription}.{table}"


@pytest.mark.parametrize(
    "names", ["shop.{table}", "main.{subscription}.{schema}_{table}", "{schema}.{table}"]
)
def test_templates_of_two_or_three_parts_are_accepted(names: str) -> None:
    assert CatalogConfig(names=names).names == names


@pytest.mark.parametrize(
    "names",
    [
        *("{table}", "a.b.c.{table}", "shop.", "shop.t", "shop.{name}", "shop.{table", "shop.{table!r}"),
        *("shop.{}", "shop.{table:>10}", "shop.{table.x}", ".{table}"),
    ],
)
def test_other_templates_are_refused(names: str) -> None:
    with pytest.raises(ValidationError):
        CatalogConfig(names=names)

"""The section `catalog` of pgsieve.yaml: the names that the replicas get in the catalog of the Spark session.

In: the template for the names, such as `{subscription}.{table}`
Out: the same template. Raises errors that become a ConfigError if the template is invalid.
"""

from string import Formatter
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from pgsieve.pipelines.config.values import NonEmptyText, make_refusal
from pgsieve.resources.lake.catalog_names import PLACEHOLDERS


def _check_template(text: str) -> str:
    try:
        fields = [field for _, field, spec, conversion in Formatter().parse(text) if field is not None]
        is_plain = not any(spec or conversion for _, _, spec, conversion in Formatter().parse(text))
    except ValueError:
        fields, is_plain = [], False
    allowed_fields = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    if not is_plain or set(fields) - set(PLACEHOLDERS) or "table" not in fields:
        raise make_refusal(
            "is not a template for names", f"text with {allowed_fields}; {{table}} has to be there"
        )
    parts = text.split(".")
    if len(parts) not in {2, 3} or not all(parts):
        raise make_refusal("should have two or three parts", "`database.table` or `catalog.database.table`")
    return text


class CatalogConfig(BaseModel):
    """The template for the names of replicas in the catalog."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    names: Annotated[NonEmptyText, AfterValidator(_check_template)] = "{subscription}.{table}"

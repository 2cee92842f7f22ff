"""Names of replicas in a catalog, and the locations that catalogs report for them."""

from __future__ import annotations

from pgsieve.resources.lake.catalog import is_location_of, quote_table_name
from pgsieve.resources.lake.catalog_names import format_catalog_name


def test_a_dot_in_a_tables_name_separates_nothing() -> None:
    name = format_catalog_name("{subscription}.{schema}_{table}", "sales", "public", "a.b`c")
    assert name == ("sales", "public_a.b`c")
    assert quote_table_name(name) == "`sales`.`public_a.b``c`"


def test_a_catalog_may_have_three_parts() -> None:
    assert format_catalog_name("main.{subscription}.{table}", "sales", "public", "t") == (
        "main",
        "sales",
        "t",
    )


def test_a_location_is_the_same_with_and_without_its_scheme() -> None:
    assert is_location_of("file:/a%20lake/t", "/a%20lake/t")
    assert is_location_of("file:///a lake/t/", "/a lake/t")
    assert is_location_of("file:/a%20lake/%C3%A9/t", "/a lake/é/t")
    assert is_location_of("file:/100%/t", "/100%/t")
    assert is_location_of("s3a://lake/a b/t", "s3a://lake/a%20b/t")
    assert not is_location_of("file:/a lake/t", "/a%20lake/t"), "this is another folder"
    assert is_location_of("s3a://lake/x/t", "s3a://lake/x/t")
    assert not is_location_of("s3a://lake/x/t2", "s3a://lake/x/t")
    assert not is_location_of("", "/t")
    assert not is_location_of(None, "/t")

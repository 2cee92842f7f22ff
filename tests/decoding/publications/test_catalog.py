"""How a subscription's publications send a partition: as which relation, which operations, which rows.

The rules are those of get_rel_sync_entry() in src/backend/replication/pgoutput/pgoutput.c.
"""

from __future__ import annotations

import pytest

from pgsieve.decoding.publications.catalog import (
    Attribute,
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)
from pgsieve.decoding.publications.published_tables import PublishedRelation, find_published_relation

COLUMNS = (Attribute("id", 23, -1, "integer"), Attribute("region", 25, -1, "text"))
#: measurements (1) ⊃ europe (2) ⊃ berlin (3)
ROOT = Table(1, "public", "measurements", "p", "d", COLUMNS, ("id",), leaves=(3,))
MIDDLE = Table(2, "public", "europe", "p", "d", COLUMNS, ("id",), ancestors=(1,), leaves=(3,))
LEAF = Table(3, "public", "berlin", "r", "d", COLUMNS, ("id",), ancestors=(2, 1))
CATALOG = Catalog({t.oid: t for t in (ROOT, MIDDLE, LEAF)}, {})


def publication(
    name: str,
    table: Table,
    where: str | None = None,
    *,
    via_root: bool = False,
    columns: frozenset[str] | None = None,
    operations: str = "insert update delete truncate",
) -> Publication:
    entries = (PublicationTable(table.oid, where, columns),)
    return Publication(name, frozenset(operations.split()), tables=entries, via_root=via_root)


def sent(*publications: Publication) -> PublishedRelation:
    relation = find_published_relation(LEAF, publications, CATALOG)
    assert relation is not None
    return relation


@pytest.mark.parametrize(
    ("publications", "publish_as"),
    [
        pytest.param([publication("p", ROOT)], LEAF, id="without via_root a partition is itself"),
        pytest.param([publication("p", ROOT, via_root=True)], ROOT, id="with via_root it is the listed root"),
        pytest.param([publication("p", MIDDLE, via_root=True)], MIDDLE, id="which may be within a tree"),
        pytest.param(
            [publication("p", MIDDLE, via_root=True), publication("q", ROOT, via_root=True)],
            ROOT,
            id="the topmost root of all publications counts",
        ),
        pytest.param(
            [publication("p", ROOT), publication("q", MIDDLE, via_root=True)],
            MIDDLE,
            id="and only publications with via_root have one",
        ),
    ],
)
def test_a_partition_is_published_as_the_topmost_root_of_all_publications(
    publications: list[Publication], publish_as: Table
) -> None:
    assert sent(*publications).publish_as is publish_as


def test_only_publications_of_the_topmost_root_filter_but_all_publications_send_operations() -> None:
    relation = sent(
        publication("leaf", LEAF, "region = 'leaf'", operations="delete"),
        publication("root", ROOT, "region = 'root'", via_root=True, operations="insert update"),
    )
    assert relation.publications == ("root",)
    assert relation.operations == {"insert", "update", "delete"}
    assert relation.filters == {
        "insert": ("region = 'root'",),
        "update": ("region = 'root'",),
        "delete": None,
    }


def test_row_filters_of_an_operation_are_ored_and_a_publication_without_one_passes_every_row() -> None:
    first, second = publication("p", LEAF, "id > 1"), publication("q", LEAF, "id < 0")
    assert sent(first, second, first).filters["insert"] == ("id > 1", "id < 0")
    assert sent(first, publication("r", LEAF)).filters["insert"] is None


def test_publications_must_agree_on_the_columns_of_a_table() -> None:
    some = publication("p", LEAF, columns=frozenset({"id"}))
    assert sent(some).columns == ("id",)
    with pytest.raises(PublicationError, match="different column lists"):
        sent(some, publication("q", LEAF))

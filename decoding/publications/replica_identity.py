"""Replica identities: changes that a publisher refuses, and changes for which a subscriber finds no row.

In: a table, publications, and the catalog. Out:

- `find_publisher_errors`: the errors that UPDATE and DELETE would raise on the publisher.
- `find_subscriber_error`: the error that UPDATE and DELETE would raise on a subscriber.

The publisher's rules are CheckCmdReplicaIdentity() of src/backend/executor/execReplication.c with
pub_rf_contains_invalid_column() and pub_contains_invalid_column() of src/backend/commands/publicationcmds.c.
The subscriber's rule is check_relation_updatable() of src/backend/replication/logical/worker.c. It applies to the
leaf that contains the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, Publication, Table
from pgsieve.decoding.publications.published_tables import (
    ReplicatedTable,
    find_publish_as_relation,
    find_published_relation,
)

_COMMAND_AND_ACTIVITY_BY_OPERATION: Final = {
    "update": ("update", "updating"),
    "delete": ("delete from", "deleting from"),
}


class ReplicaIdentityError(PgsieveError):
    """The publisher refuses an UPDATE or DELETE, or a subscriber cannot find the row that it changes."""


def find_publisher_errors(
    table: Table, publication: Publication, catalog: Catalog
) -> Iterator[ReplicaIdentityError]:
    """Yield the errors that UPDATE and DELETE of the table would raise because of this publication.

    With publish_via_partition_root, the server compares the columns of the root's filter and column list with the
    identity columns of the leaf, by name.
    """
    relation_and_level = find_publish_as_relation(publication, table, catalog)
    operations = [o for o in _COMMAND_AND_ACTIVITY_BY_OPERATION if o in publication.operations]
    if relation_and_level is None or not operations:
        return
    problem = _find_coverage_problem(table, relation_and_level[0], publication, catalog.server_version)
    for operation in operations:
        command, activity = _COMMAND_AND_ACTIVITY_BY_OPERATION[operation]
        if problem is not None:
            reason, columns, hint = problem
            yield ReplicaIdentityError(
                f'cannot {command} table "{table.qualified_name}": {reason} (publication "{publication.name}":'
                f" {', '.join(columns)})",
                hint=hint,
                sqlstate="42P10",
            )
        elif table.replica_identity != "f" and not table.identity:
            yield ReplicaIdentityError(
                f'cannot {command} table "{table.qualified_name}" because it does not have a replica identity and publishes'
                f' {operation}s (publication "{publication.name}")',
                hint=f"To enable {activity} the table, set REPLICA IDENTITY using ALTER TABLE.",
                sqlstate="55000",
            )


def _find_coverage_problem(
    table: Table, publish_as: Table, publication: Publication, server_version: int
) -> tuple[str, list[str], str] | None:
    """Return why a table's replica identity does not fit a publication; None if it fits.

    The result is the publisher's message, the columns in question, and a hint. The identity does not fit if the row
    filter reads other columns, or if the publication does not send all identity columns.
    """
    entry = None if publication.all_tables else publication.find_table_entry(publish_as.oid)
    is_full = table.replica_identity == "f"
    identity = set(table.identity)
    if (
        entry is not None
        and not is_full
        and (uncovered_columns := (entry.filter_columns or frozenset()) - identity)
    ):
        return (
            "Column used in the publication WHERE expression is not part of the replica identity.",
            sorted(uncovered_columns),
            "set REPLICA IDENTITY FULL or an index that has the column, or publish only inserts",
        )
    columns = entry.columns if entry is not None else None
    if columns is not None and (is_full or not identity <= columns):
        return (
            "Column list used by the publication does not cover the replica identity.",
            sorted(identity - columns) or ["REPLICA IDENTITY FULL"],
            "remove the column list"
            if is_full
            else "add the columns of the replica identity to the column list",
        )
    if server_version < 180000 or (columns is not None and not is_full):
        return None
    published_kinds = {"", "s"} if publication.generated_columns == "s" else {""}
    if unpublished_columns := [
        a.name for a in table.attributes if a.name in identity and a.generated not in published_kinds
    ]:
        return (
            "Replica identity must not contain unpublished generated columns.",
            unpublished_columns,
            "publish them with publish_generated_columns = stored, or choose another replica identity",
        )
    return None


def find_subscriber_error(
    replicated_table: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> ReplicaIdentityError | None:
    """The error that a subscriber would raise because it cannot find the row of an UPDATE or DELETE, or None.

    Returns None if the replica has a key. In a partition tree, a subscriber assumes that this key is the identity of
    all leaves, and raises no error. `find_leaves_without_root_key` lists the leaves for which the assumption is wrong.
    """
    relations = (
        [] if replicated_table.key else _find_relations_without_key(replicated_table, publications, catalog)
    )
    if not relations:
        return None
    table, relation = replicated_table.table, relations[0]
    unsent_columns = [c for c in relation.identity if c not in replicated_table.columns]
    if unsent_columns:
        reason = f"the replica identity has {', '.join(unsent_columns)}, which is not published"
        hint = "choose a replica identity of published columns, or REPLICA IDENTITY FULL, or publish only inserts"
    else:
        identity = ", ".join(relation.identity)
        reason = f'the replica identity ({identity}) of partition "{relation.qualified_name}" is not a key of the whole table'
        hint = (
            "give every partition REPLICA IDENTITY FULL, or the same primary key with the columns of the partition key;"
            " or publish the partitions themselves (publish_via_partition_root = false), or only inserts"
        )
    return ReplicaIdentityError(
        f'table "{table.qualified_name}": publisher did not send replica identity column expected by the replica: {reason}',
        hint=hint,
        sqlstate="55000",
    )


def find_leaves_without_root_key(
    replicated_table: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> list[Table]:
    """The leaves whose old rows lack columns of the root's key.

    A subscriber searches for a row by the root's key, so it does not find the rows of these leaves.
    """
    return (
        _find_relations_without_key(replicated_table, publications, catalog) if replicated_table.key else []
    )


def _find_relations_without_key(
    replicated_table: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> list[Table]:
    """The relations of a replicated table whose old rows can lack columns by which a subscriber finds the row."""
    key = set(replicated_table.key)
    return [
        relation
        for relation in replicated_table.leaves or (replicated_table.table,)
        if relation.identity  # Otherwise the publisher refuses the change.
        and not (key <= set(relation.identity) if key else relation.replica_identity == "f")
        and can_send_updates_or_deletes(relation, replicated_table.table, publications, catalog)
    ]


def can_send_updates_or_deletes(
    relation: Table, published_table: Table, publications: Sequence[Publication], catalog: Catalog
) -> bool:
    """Whether the publisher allows UPDATE or DELETE of a relation, and sends it as a change of `published_table`."""
    sent_relation = find_published_relation(relation, publications, catalog)
    if sent_relation is None or sent_relation.publish_as.oid != published_table.oid:
        return False
    refusing_publications = [p for p in publications if any(find_publisher_errors(relation, p, catalog))]
    return bool(
        (sent_relation.operations & {*_COMMAND_AND_ACTIVITY_BY_OPERATION})
        - frozenset().union(*(p.operations for p in refusing_publications))
    )

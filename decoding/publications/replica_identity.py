"""Replica identities: changes that a publisher refuses, and changes that find no row in a replica.

In: a table, publications, and the catalog. Out: the errors that UPDATE and DELETE would raise on the
publisher (`refused_changes`), and the error that they would raise on a subscriber (`unfound_rows`). The
publisher's rules are CheckCmdReplicaIdentity() of src/backend/executor/execReplication.c with
pub_rf_contains_invalid_column() and pub_contains_invalid_column() of src/backend/commands/publicationcmds.c;
the subscriber's rule is check_relation_updatable() of src/backend/replication/logical/worker.c, applied to
the leaf of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import (
    Catalog,
    Publication,
    ReplicatedTable,
    Table,
    published_as,
    published_relation,
)

_COMMANDS: Final = {"update": ("update", "updating"), "delete": ("delete from", "deleting from")}


class ReplicaIdentityError(PgsieveError):
    """The publisher would refuse UPDATE or DELETE: the replica identity does not cover what is published."""


def refused_changes(
    table: Table, publication: Publication, catalog: Catalog
) -> Iterator[ReplicaIdentityError]:
    """The errors that UPDATE and DELETE of the table would raise for this publication.

    With publish_via_partition_root, the root's filter and column list are compared with the leaf's identity
    by name.
    """
    placed = published_as(publication, table, catalog)
    operations = [o for o in _COMMANDS if o in publication.operations]
    if placed is None or not operations:
        return
    uncovered = _uncovered(table, placed[0], publication, catalog.server_version)
    for operation in operations:
        command, doing = _COMMANDS[operation]
        if uncovered is not None:
            reason, columns, hint = uncovered
            yield ReplicaIdentityError(
                f'cannot {command} table "{table.qualified}": {reason} (publication "{publication.name}":'
                f" {', '.join(columns)})",
                hint=hint,
                sqlstate="42P10",
            )
        elif table.replica_identity != "f" and not table.identity:
            yield ReplicaIdentityError(
                f'cannot {command} table "{table.qualified}" because it does not have a replica identity and publishes'
                f' {operation}s (publication "{publication.name}")',
                hint=f"To enable {doing} the table, set REPLICA IDENTITY using ALTER TABLE.",
                sqlstate="55000",
            )


def _uncovered(
    table: Table, publish_as: Table, publication: Publication, server_version: int
) -> tuple[str, list[str], str] | None:
    """The reason for a refusal, the columns that cause it, and the remedy; None without a reason."""
    entry = None if publication.all_tables else publication.listed(publish_as.oid)
    full = table.replica_identity == "f"
    identity = set(table.identity)
    if entry is not None and not full and (beyond := (entry.filter_columns or frozenset()) - identity):
        return (
            "Column used in the publication WHERE expression is not part of the replica identity.",
            sorted(beyond),
            "set REPLICA IDENTITY FULL or an index that has the column, or publish only inserts",
        )
    columns = entry.columns if entry is not None else None
    if columns is not None and (full or not identity <= columns):
        return (
            "Column list used by the publication does not cover the replica identity.",
            sorted(identity - columns) or ["REPLICA IDENTITY FULL"],
            "take the column list away"
            if full
            else "add the columns of the replica identity to the column list",
        )
    if server_version < 180000 or (columns is not None and not full):
        return None
    published = {"", "s"} if publication.generated_columns == "s" else {""}
    if unpublished := [
        a.name for a in table.attributes if a.name in identity and a.generated not in published
    ]:
        return (
            "Replica identity must not contain unpublished generated columns.",
            unpublished,
            "publish them with publish_generated_columns = stored, or choose another replica identity",
        )
    return None


def unfound_rows(
    replicated: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> ReplicaIdentityError | None:
    """The error if UPDATE or DELETE of some rows, as it is sent, would find no row of the replica.

    None if every change finds its row, if no such change is sent, or if the root of a partition tree has a
    key: a subscriber assumes this key as the identity of all leaves (`leaves_of_another_identity`).
    """
    unfound = [] if replicated.key else _unfound(replicated, publications, catalog)
    if not unfound:
        return None
    table, relation = replicated.table, unfound[0]
    unsent = [c for c in relation.identity if c not in replicated.columns]
    if unsent:
        reason = f"the replica identity has {', '.join(unsent)}, which is not published"
        hint = "choose a replica identity of published columns, or REPLICA IDENTITY FULL, or publish only inserts"
    else:
        identity = ", ".join(relation.identity)
        reason = f'the replica identity ({identity}) of partition "{relation.qualified}" is no key of the whole table'
        hint = (
            "give every partition REPLICA IDENTITY FULL, or a primary key of the same columns that contains the"
            " partition key; or publish the partitions as themselves (publish_via_partition_root = false), or only inserts"
        )
    return ReplicaIdentityError(
        f'table "{table.qualified}": publisher did not send replica identity column expected by the replica: {reason}',
        hint=hint,
        sqlstate="55000",
    )


def leaves_of_another_identity(
    replicated: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> list[Table]:
    """The leaves whose old rows lack the root's key, by which a subscriber would search for them."""
    return _unfound(replicated, publications, catalog) if replicated.key else []


def _unfound(
    replicated: ReplicatedTable, publications: Sequence[Publication], catalog: Catalog
) -> list[Table]:
    """The relations of a replicated table whose UPDATE or DELETE may lack columns that find the row."""
    key = set(replicated.key)
    return [
        relation
        for relation in replicated.leaves or (replicated.table,)
        if relation.identity  # Otherwise the publisher refuses the change.
        and not (key <= set(relation.identity) if key else relation.replica_identity == "f")
        and may_change(relation, replicated.table, publications, catalog)
    ]


def may_change(
    relation: Table, published: Table, publications: Sequence[Publication], catalog: Catalog
) -> bool:
    """Whether the publisher allows UPDATE or DELETE, and sends it as a change of the published table."""
    sent = published_relation(relation, publications, catalog)
    if sent is None or sent.publish_as.oid != published.oid:
        return False
    refusing = [p for p in publications if any(refused_changes(relation, p, catalog))]
    return bool((sent.operations & {*_COMMANDS}) - frozenset().union(*(p.operations for p in refusing)))

"""Changes that a publisher refuses because of a publication and a table's replica identity.

In: a table that rows live in, one publication, and the catalog. Out: the error that UPDATE and DELETE would
raise. The rules are CheckCmdReplicaIdentity() of src/backend/executor/execReplication.c with
pub_rf_contains_invalid_column() and pub_contains_invalid_column() of src/backend/commands/publicationcmds.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, Publication, Table, published_as

_COMMANDS: Final = {"update": ("update", "updating"), "delete": ("delete from", "deleting from")}


class ReplicaIdentityError(PgsieveError):
    """The publisher would refuse UPDATE or DELETE: the replica identity does not cover what is published."""


def refused_changes(
    table: Table, publication: Publication, catalog: Catalog
) -> Iterator[ReplicaIdentityError]:
    """The errors that UPDATE and DELETE of the table would raise for this publication.

    With publish_via_partition_root the root's filter and list count, and the leaf's identity, matched by name.
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
    """The reason, the columns it is about, and the way out."""
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

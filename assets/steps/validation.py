"""What PostgreSQL or pgsieve would refuse, found before anything is created.

In: a feed's subscription and its publisher's catalog. Out: errors: publications that are missing
or disagree, row filters that Spark cannot evaluate exactly, row filters and column lists that the replica
identity does not cover (CheckCmdReplicaIdentity() in src/backend/executor/execReplication.c).
"""

from collections.abc import Iterator

from assets.steps.row_filters import row_filter
from assets.steps.subscription import Feed
from decoding.errors import PgsieveError
from decoding.publication import (
    Catalog,
    PublicationError,
    PublishedRelation,
    published_relation,
    replicated_tables,
)
from decoding.routing import changed_relations
from decoding.row_filter import RowFilter


class ReplicaIdentityError(PgsieveError):
    """The publisher would refuse UPDATE or DELETE: the replica identity does not cover what is published."""


def refuse_unsound(feed: Feed, catalog: Catalog) -> None:
    """Raise the first problem that has to be mended before anything is created.

    The publisher itself refuses an UPDATE that its own publication does not allow; a publication that
    pgsieve.yaml defines is held to the same rule here.
    """
    for subscription, names in feed.subscriptions.items():
        defined = any(name in feed.defined for name in names)
        for problem in problems(feed, subscription, catalog):
            if defined or not isinstance(problem, ReplicaIdentityError):
                raise problem


def problems(feed: Feed, subscription: str, catalog: Catalog) -> Iterator[PgsieveError]:
    """Everything that stands in the way of a subscription."""
    try:
        publications = feed.publications(catalog, subscription)
        replicated_tables(publications, catalog)
    except PublicationError as error:
        yield error
        return
    seen: set[str] = set()
    for table in changed_relations(catalog):
        try:
            sent = published_relation(table, publications, catalog)
        except PublicationError as error:
            yield error
            continue
        if sent is None:
            continue
        for problem in _relation_problems(feed, sent):
            if str(problem) not in seen:
                seen.add(str(problem))
                yield problem


def _relation_problems(feed: Feed, sent: PublishedRelation) -> Iterator[PgsieveError]:
    identity = set(sent.relation.identity)
    for operation in ("update", "delete"):
        if operation not in sent.operations:
            continue
        if not identity:
            yield ReplicaIdentityError(
                f'cannot {operation} table "{sent.relation.qualified}" because it does not have a replica identity and'
                f" publishes {operation}s",
                hint="To enable it, set REPLICA IDENTITY using ALTER TABLE.",
                sqlstate="55000",
            )
            continue
        yield from _uncovered(sent, operation, identity)
    for texts in sent.filters.values():
        for text in texts or ():
            try:
                row_filter(sent, text)
            except PgsieveError as error:
                # The publisher evaluates its own filters: there only what it refuses itself counts.
                if not feed.filtered:
                    yield error


def _uncovered(sent: PublishedRelation, operation: str, identity: set[str]) -> Iterator[PgsieveError]:
    for text in sent.filters[operation] or ():
        try:
            parsed: RowFilter = row_filter(sent, text)
        except PgsieveError:
            continue
        if not parsed.columns <= identity:
            columns = ", ".join(sorted(parsed.columns - identity))
            yield ReplicaIdentityError(
                f'cannot {operation} table "{sent.relation.qualified}": column used in the publication WHERE expression'
                f" is not part of the replica identity ({columns})",
                hint="set REPLICA IDENTITY FULL or an index that has the column, or publish only inserts",
                sqlstate="42P10",
            )
    listed = set(sent.columns)
    if sent.relation.replica_identity != "f" and not identity <= listed:
        columns = ", ".join(sorted(identity - listed))
        yield ReplicaIdentityError(
            f'cannot {operation} table "{sent.relation.qualified}": column list used by the publication does not cover'
            f" the replica identity ({columns})",
            hint="add the columns of the replica identity to the column list",
            sqlstate="42P10",
        )

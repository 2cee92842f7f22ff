"""Makes the paths of a lake's Delta tables, and writes identifiers as folder names.

In: - the URI of the lake
    - the names of streams (a stream is one slot and its change log), subscriptions and tables
Out: paths.

ARCHITECTURE.md describes the tables. `pgsieve.assets.steps.records` defines the columns of pgsieve's own tables.
"""

import re
from collections.abc import Callable, Mapping

from pgsieve.resources.lake.delta.layout import DEFAULT_FOLDER_TEMPLATE

#: The folder of pgsieve's own tables. It is next to the folders of the subscriptions; no subscription can have
#: this name.
OWN_FOLDER = "_pgsieve"


def escape(identifier: str) -> str:
    """An identifier as a folder name.

    Each byte (UTF-8) of a character outside [a-z0-9_] becomes ~XX, so `unescape` can reverse it.

    Upper case letters are escaped because some file systems ignore case. An underscore at the start is escaped
    because Spark ignores folders whose name begins with it.
    """
    folder_name = re.sub(
        r"[^a-z0-9_]", lambda match: "".join(f"~{byte:02X}" for byte in match.group().encode()), identifier
    )
    return "~5F" + folder_name[1:] if folder_name.startswith("_") else folder_name


def unescape(folder: str) -> str:
    """The identifier that `escape` has turned into this folder name."""
    identifier_bytes = re.sub(
        rb"~([0-9A-F]{2})", lambda match: bytes([int(match.group(1), 16)]), folder.encode()
    )
    return identifier_bytes.decode()


def format_replica_folder(template: str, schema: str, table: str) -> str:
    """The folder of a replica (a table's copy), relative to its subscription's folder, by a template (`{schema}/{table}`)."""
    return template.format(schema=escape(schema), table=escape(table))


class LakePaths:
    """The paths of the tables of one lake.

    `template_by_subscription` maps subscriptions to the templates of their replicas' folders, such as `{schema}/{table}`.
    For a subscription that it does not contain, `find_recorded_template` returns the template that the lake has recorded.
    """

    def __init__(
        self,
        uri: str,
        template_by_subscription: Mapping[str, str] | None = None,
        find_recorded_template: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.uri = uri
        self._template_by_subscription, self._find_recorded_template = (
            dict(template_by_subscription or {}),
            find_recorded_template,
        )

    def _slot_stream_folder(self, stream: str) -> str:
        """The folder of a stream.

        A name with slashes, such as `shop/as_published/orders`, is a folder within the folder of the stream `shop`. If
        publications were altered during a slice (the changes between two positions of the slot), the publisher decodes
        the slice once more, with the publications of the subscription `orders`. The inner folder has the result.
        """
        return "/".join([self.uri, OWN_FOLDER, *map(escape, stream.split("/"))])

    def change_log(self, stream: str) -> str:
        """The raw messages of a slot. A stream is named after its source, or with `row_filter: publisher` after its slot."""
        return f"{self._slot_stream_folder(stream)}/change_log"

    def slices(self, stream: str) -> str:
        """A summary of each slice of the change log: the descriptions of relations, and the TRUNCATEs.

        Rows that are missing in this table can be derived from the change log again.
        """
        return f"{self._slot_stream_folder(stream)}/slices"

    def prepared_transactions(self, stream: str) -> str:
        """The prepared transactions that were neither committed nor rolled back when the change log was last written."""
        return f"{self._slot_stream_folder(stream)}/prepared"

    def catalogs(self, stream: str) -> str:
        """The publisher's catalog. A copy of it is recorded after each alteration."""
        return f"{self._slot_stream_folder(stream)}/catalogs"

    def altered_slices(self, stream: str) -> str:
        """For each subscription, the slices in which the publisher's catalog may have been altered.

        The publisher decodes these slices a second time (`as_published`).
        """
        return f"{self._slot_stream_folder(stream)}/altered"

    def replica(self, subscription: str, schema: str, table: str) -> str:
        """The replica of a table: its current rows, with the published columns."""
        return f"{self.uri}/{subscription}/{format_replica_folder(self.folder_template(subscription), schema, table)}"

    def folder_template(self, subscription: str) -> str:
        """The template of the folders of a subscription's replicas. It is configured, or else the lake has recorded it."""
        if subscription not in self._template_by_subscription:
            self._template_by_subscription[subscription] = (
                self._find_recorded_template(subscription) or DEFAULT_FOLDER_TEMPLATE
            )
        return self._template_by_subscription[subscription]

    def change_history(self, subscription: str, schema: str, table: str, generation: int = 0) -> str:
        """The change history of a table: its changes, decoded from the change log, and filtered for the subscription.

        If the history of a table begins anew, for example after a change of a column's type, the new history has a
        `generation`, and a path that ends in `~g1`, `~g2` and so on. No escaped name ends in `~g` and a number.
        """
        suffix = f"~g{generation}" if generation else ""
        return f"{self.uri}/{subscription}/_changes/{escape(schema)}/{escape(table)}{suffix}"

    def row_versions(self, subscription: str, schema: str, table: str, generation: int = 0) -> str:
        """The versions of a table's rows. They have the same generations as the change history."""
        suffix = f"~g{generation}" if generation else ""
        return f"{self.uri}/{subscription}/_scd2/{escape(schema)}/{escape(table)}{suffix}"

    def corrections(self, subscription: str, schema: str, table: str) -> str:
        """The folder of the changes with which repairs correct a replica. A repair removes the folder when it ends."""
        return f"{self.uri}/{subscription}/_corrections/{escape(schema)}/{escape(table)}"

    def transformed_slices(self, subscription: str) -> str:
        """The slices that were transformed into change histories. Each has a row per table, which summarizes the changes."""
        return f"{self.uri}/{subscription}/_transformed"

    def table_states(self, subscription: str) -> str:
        """The sync states of the tables, for example ready, or being copied. For each table the newest row counts."""
        return f"{self.uri}/{subscription}/_table_states"

    def subscription(self, name: str) -> str:
        """The state of a subscription as a whole. The newest row counts."""
        return f"{self.uri}/{name}/_subscription"

    def registered_names(self, subscription: str) -> str:
        """The names that pgsieve has registered in Spark's catalog. For each name the newest row counts."""
        return f"{self.uri}/{subscription}/_registered"

    def sequences(self, subscription: str) -> str:
        """The values of the published sequences. For each sequence the newest row counts."""
        return f"{self.uri}/{subscription}/_sequences"

    def slot_stream(self, stream: str) -> str:
        """The claim of a slot: only this lake may read the slot. It also names the slot's cluster. The newest row counts."""
        return f"{self.uri}/{OWN_FOLDER}/{escape(stream)}/feed"

    def cuts(self, subscription: str) -> str:
        """The cuts of a subscription.

        A cut is an LSN that all replicas have reached, with the Delta version of each replica.
        """
        return f"{self.uri}/{subscription}/_cuts"

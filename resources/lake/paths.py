"""The paths of a lake's Delta tables, and identifiers as folder names.

In: the lake's URI, and names of feeds, subscriptions and tables. Out: paths. ARCHITECTURE.md describes the
tables, and `pgsieve.assets.steps.records` the columns of pgsieve's own.
"""

import re
from collections.abc import Callable, Mapping

from pgsieve.resources.lake.delta.layout import FOLDERS

#: The folder of pgsieve's own tables, next to the subscriptions' folders, none of which has this name.
OWN_FOLDER = "_pgsieve"


def escape(identifier: str) -> str:
    """An identifier as a folder name, reversibly: each byte (UTF-8) of a character outside [a-z0-9_] becomes ~XX.

    Upper case is escaped because some file systems ignore case, and a leading underscore because Spark hides
    such folders.
    """
    escaped = re.sub(
        r"[^a-z0-9_]", lambda match: "".join(f"~{byte:02X}" for byte in match.group().encode()), identifier
    )
    return "~5F" + escaped[1:] if escaped.startswith("_") else escaped


def unescape(folder: str) -> str:
    """The identifier from a folder name, the inverse of `escape`."""
    raw = re.sub(rb"~([0-9A-F]{2})", lambda match: bytes([int(match.group(1), 16)]), folder.encode())
    return raw.decode()


def replica_folder(template: str, schema: str, table: str) -> str:
    """The folder of a replica by a template, relative to its subscription's folder."""
    return template.format(schema=escape(schema), table=escape(table))


class LakePaths:
    """The paths of one lake's tables.

    `folders` has the template of the replicas' folders for subscriptions. For others, `recorded` returns the
    template that the lake has recorded.
    """

    def __init__(
        self,
        uri: str,
        folders: Mapping[str, str] | None = None,
        recorded_template: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.uri = uri
        self._folders, self._recorded = dict(folders or {}), recorded_template

    def _feed_folder(self, slot_owner: str) -> str:
        """A feed's folder. A name with slashes belongs to a part of another feed, and its folder is below that feed's."""
        return "/".join([self.uri, OWN_FOLDER, *map(escape, slot_owner.split("/"))])

    def change_log(self, slot_owner: str) -> str:
        """The raw messages of a slot: of a source, or of a subscription with its own slot."""
        return f"{self._feed_folder(slot_owner)}/change_log"

    def slices(self, slot_owner: str) -> str:
        """The contents of each slice of the change log besides row changes; rows that are missing are derived again."""
        return f"{self._feed_folder(slot_owner)}/slices"

    def prepared(self, slot_owner: str) -> str:
        """The prepared transactions whose second phase was pending when the change log was last written."""
        return f"{self._feed_folder(slot_owner)}/prepared"

    def catalogs(self, slot_owner: str) -> str:
        """The publisher's catalog, recorded after each alteration."""
        return f"{self._feed_folder(slot_owner)}/catalogs"

    def altered(self, slot_owner: str) -> str:
        """The slices in which the catalog may have been altered, by subscription (`as_published`)."""
        return f"{self._feed_folder(slot_owner)}/altered"

    def replica(self, subscription: str, schema: str, table: str) -> str:
        """The replica of a table: the current rows, with the published columns."""
        return f"{self.uri}/{subscription}/{replica_folder(self.folders_of(subscription), schema, table)}"

    def folders_of(self, subscription: str) -> str:
        """The template of the folders of a subscription's replicas: the configured one, or else the recorded one."""
        if subscription not in self._folders:
            self._folders[subscription] = self._recorded(subscription) or FOLDERS
        return self._folders[subscription]

    def changes(self, subscription: str, schema: str, table: str, generation: int = 0) -> str:
        """The change history of a table: its transformed changes. Later histories (generations) end in `~g1`, ...

        No escaped name ends in `~g` and a number.
        """
        suffix = f"~g{generation}" if generation else ""
        return f"{self.uri}/{subscription}/_changes/{escape(schema)}/{escape(table)}{suffix}"

    def versions(self, subscription: str, schema: str, table: str, generation: int = 0) -> str:
        """The versions of a table's rows, with generations like the change history's."""
        suffix = f"~g{generation}" if generation else ""
        return f"{self.uri}/{subscription}/_scd2/{escape(schema)}/{escape(table)}{suffix}"

    def transformed(self, subscription: str) -> str:
        """The transformed slices: a row per slice and table, which summarizes the changes."""
        return f"{self.uri}/{subscription}/_transformed"

    def table_states(self, subscription: str) -> str:
        """The sync states of tables; for each table the newest row counts."""
        return f"{self.uri}/{subscription}/_table_states"

    def subscription(self, name: str) -> str:
        """The state of a subscription as a whole; the newest row counts."""
        return f"{self.uri}/{name}/_subscription"

    def registered(self, subscription: str) -> str:
        """The names that pgsieve has registered in a catalog; for each name the newest row counts."""
        return f"{self.uri}/{subscription}/_registered"

    def sequences(self, subscription: str) -> str:
        """The values of the published sequences; for each sequence the newest row counts."""
        return f"{self.uri}/{subscription}/_sequences"

    def feed(self, slot_owner: str) -> str:
        """The cluster to which a slot's LSNs belong; the newest row counts."""
        return f"{self.uri}/{OWN_FOLDER}/{escape(slot_owner)}/feed"

    def cuts(self, subscription: str) -> str:
        """The LSNs that all replicas of a subscription have reached (cuts), with the replicas' Delta versions."""
        return f"{self.uri}/{subscription}/_cuts"

"""Lists the options to send to the output plugin pgoutput, for each version of the server.

In: the options of a subscription.
Out: the names and values of the options, for START_REPLICATION and for the functions pg_logical_slot_peek_...
     (PostgreSQL documentation, Logical Streaming Replication Parameters;
     src/backend/replication/pgoutput/pgoutput.c).

Options that a server does not support are left out, as PostgreSQL's own subscriber leaves them out
(src/backend/replication/libpqwalreceiver/libpqwalreceiver.c). Raises nothing.
"""

from dataclasses import dataclass
from typing import Literal

from pgsieve.resources.postgres.source import quote

#: Pairs of a server version and a protocol version, newest first. From the server version on, servers support the
#: protocol version.
PROTOCOL_VERSIONS = ((160000, 4), (150000, 3), (140000, 2), (0, 1))


def find_protocol_version(server_version: int) -> int:
    """The newest version of the logical replication protocol that the server supports."""
    return next(protocol for first_version, protocol in PROTOCOL_VERSIONS if server_version >= first_version)


@dataclass(frozen=True, slots=True)
class PgoutputOptions:
    """The options for pgoutput. All but `publications` and `messages` have the names of options of CREATE SUBSCRIPTION.

    Servers before 16 get the value "on" instead of "parallel", and always send changes of every `origin`.
    """

    publications: tuple[str, ...] = ()
    binary: bool = False
    streaming: Literal["off", "on", "parallel"] = "off"
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"
    messages: bool = False

    def make_arguments(self, server_version: int) -> dict[str, str]:
        """Maps the names of the options to their values, in the order in which they are sent.

        Options at their default are left out.
        """
        protocol = find_protocol_version(server_version)
        streaming = "on" if self.streaming == "parallel" and protocol < 4 else self.streaming
        options = (
            ("binary", 140000, self.binary, "true"),
            ("messages", 140000, self.messages, "true"),
            ("streaming", 140000, streaming != "off", streaming),
            ("two_phase", 150000, self.two_phase, "true"),
            ("origin", 160000, self.origin != "any", self.origin),
        )
        return {
            "proto_version": str(protocol),
            # A list of SQL identifiers. They are quoted, because the server folds unquoted names to lower case.
            "publication_names": ",".join(quote(p) for p in self.publications),
            **{
                name: value
                for name, first_version, is_set, value in options
                if is_set and server_version >= first_version
            },
        }

"""The options of the output plugin pgoutput, for each version of the server.

In: the options of a subscription. Out: the option names and values for START_REPLICATION and the functions
pg_logical_slot_peek_... (section 54.5.1; src/backend/replication/pgoutput/pgoutput.c). Raises nothing. An
option that a server does not know is left out, as PostgreSQL's own subscriber does
(src/backend/replication/libpqwalreceiver/libpqwalreceiver.c).
"""

from dataclasses import dataclass
from typing import Literal

from pgsieve.resources.postgres.source import quote

#: (least server version, protocol version), newest first.
PROTOCOL_VERSIONS = ((160000, 4), (150000, 3), (140000, 2), (0, 1))


def protocol_version(server_version: int) -> int:
    """The newest protocol version of the server (section 54.5)."""
    return next(protocol for least, protocol in PROTOCOL_VERSIONS if server_version >= least)


@dataclass(frozen=True, slots=True)
class PgoutputOptions:
    """The options for pgoutput, under the names of CREATE SUBSCRIPTION, except `messages`, which it does not have.

    Servers before 16 take "parallel" as "on", and send changes of every `origin`.
    """

    publications: tuple[str, ...] = ()
    binary: bool = False
    streaming: Literal["off", "on", "parallel"] = "off"
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"
    messages: bool = False

    def arguments(self, server_version: int) -> dict[str, str]:
        """The options to send, in order, without those at their default."""
        protocol = protocol_version(server_version)
        streaming = "on" if self.streaming == "parallel" and protocol < 4 else self.streaming
        chosen = (
            ("binary", 140000, self.binary, "true"),
            ("messages", 140000, self.messages, "true"),
            ("streaming", 140000, streaming != "off", streaming),
            ("two_phase", 150000, self.two_phase, "true"),
            ("origin", 160000, self.origin != "any", self.origin),
        )
        return {
            "proto_version": str(protocol),
            # A list of SQL identifiers; the server folds unquoted ones to lower case.
            "publication_names": ",".join(quote(p) for p in self.publications),
            **{name: value for name, since, wanted, value in chosen if wanted and server_version >= since},
        }

"""The channel of pyspark's client to the engine, by the engine's Unix socket and token.

In: the address and the token. Out: the object from which pyspark makes its channel. With an address
`sc://localhost` pyspark would connect to a port, and send the token to any process that listens there.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineChannel:
    """The engine's address for messages and for gRPC (`target`), and the token that Spark requires."""

    address: str
    target: str
    token: str = field(repr=False)

    def __str__(self) -> str:
        """The address, without the token."""
        return self.address

    def builder(self) -> Any:
        """A ChannelBuilder for pyspark, as Any because pyspark's annotations require another subclass."""
        import grpc
        from pyspark.sql.connect.client import ChannelBuilder

        target, token = self.target, self.token

        class Builder(ChannelBuilder):
            @property
            def host(self) -> str:
                return target

            def toChannel(self) -> grpc.Channel:  # noqa: N802 - pyspark's name
                local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
                bearer = grpc.access_token_call_credentials(token)
                return self._secure_channel(target, grpc.composite_channel_credentials(local, bearer))

        return Builder()

"""Connects pyspark's client to the warm engine, a local Spark Connect server, by the engine's Unix socket and token.

In: the address and the token.
Out: the object from which pyspark makes its gRPC channel.

With an address like `sc://localhost`, pyspark would connect to a port, and send the token to whatever process
listens there.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineChannel:
    """How to reach the engine.

    - `address`: the address that is printed in messages
    - `target`: the address for gRPC
    - `token`: the token that Spark requires
    """

    address: str
    target: str
    token: str = field(repr=False)

    def __str__(self) -> str:
        """The address that is printed in messages. It contains no token."""
        return self.address

    def make_builder(self) -> Any:
        """A ChannelBuilder for pyspark. Its type is Any, because pyspark's annotations require a DefaultChannelBuilder."""
        import grpc
        from pyspark.sql.connect.client import ChannelBuilder

        target, token = self.target, self.token

        class Builder(ChannelBuilder):
            @property
            def host(self) -> str:
                return target

            def toChannel(self) -> grpc.Channel:  # noqa: N802 - pyspark's name
                socket_credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
                token_credentials = grpc.access_token_call_credentials(token)
                return self._secure_channel(
                    target, grpc.composite_channel_credentials(socket_credentials, token_credentials)
                )

        return Builder()

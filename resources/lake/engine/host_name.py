"""How Spark's JVM calls the machine that it runs on.

In: the environment, and this machine's name. Out: a variable of Spark's where the name does not resolve, as in a container
without an entry in /etc/hosts: the JVM asks for its address as it starts, and ends.
"""

import os
import socket

_SPARKS_OWN = ("SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")


def name_host(master: str) -> None:
    """Have a local master call this machine `localhost` where its own name does not resolve, and the user chose no other.

    A cluster's executors have to find the driver: there it stays an error.
    """
    if not master.startswith("local") or any(map(os.environ.get, _SPARKS_OWN)):
        return
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ["SPARK_LOCAL_HOSTNAME"] = "localhost"

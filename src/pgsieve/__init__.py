"""PostgreSQL logical replication into Delta Lake, with PostgreSQL's own semantics.

The names of `__all__` are public. Everything else is private and may change with any version:

- `build_definitions(file)`: Dagster's definitions of a configuration file, for a code location of your own
- `PgsieveComponent`: the same as a component, `dg scaffold defs pgsieve.PgsieveComponent replicas`
- `PgsieveTranslator`: subclass it to change how assets appear; `PgsieveAsset` and `AssetKind` describe an
  asset to it
- `PgsieveLake`: the lake as a resource, for assets that read replicas
- `at_cut(subscription)`: an automation condition that materialises such assets after each cut
- `read_at_cut(spark, lake, subscription)`: all tables of a subscription as they were at one LSN
- `read_at(spark, lake, subscription, moment)`: the same at any LSN or time
- `messages`: pgoutput's messages as dataclasses, with `decode` and `encode`
- `Decoder`: decodes the messages of a session, in order
- `PgsieveError`: the base of all errors of pgsieve, with `hint` and `sqlstate`

`import pgsieve` imports neither Spark nor Dagster: the first use of a name imports its module.
"""

import os
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgsieve.assets.automation_condition import at_cut
    from pgsieve.assets.lake import PgsieveLake
    from pgsieve.assets.steps.moments.reading import read_at
    from pgsieve.assets.steps.records.cuts import read_at_cut
    from pgsieve.assets.translator import AssetKind, PgsieveAsset, PgsieveTranslator
    from pgsieve.decoding.errors import PgsieveError
    from pgsieve.decoding.protocol import messages
    from pgsieve.decoding.protocol.messages import Decoder
    from pgsieve.pipelines.component import PgsieveComponent
    from pgsieve.pipelines.definitions import build_definitions

    #: The tag's version; for later commits, the last tag's with the number of commits since then.
    __version__: str

# By default Arrow's allocator returns freed memory to the system after 10 ms. The next step would need it again, and page
# faults would take up to a quarter of the processor time. Within a second the next step has begun. The allocator reads
# this setting (in milliseconds) when Arrow is loaded. Python workers of Spark keep the memory
# (`pgsieve.resources.lake.python_daemon`).
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

__all__ = [
    "AssetKind",
    "Decoder",
    "PgsieveAsset",
    "PgsieveComponent",
    "PgsieveError",
    "PgsieveLake",
    "PgsieveTranslator",
    "__version__",
    "at_cut",
    "build_definitions",
    "messages",
    "read_at",
    "read_at_cut",
]

_MODULES = {"messages": "pgsieve.decoding.protocol.messages"}
_HOMES = {
    "AssetKind": "pgsieve.assets.translator",
    "Decoder": "pgsieve.decoding.protocol.messages",
    "PgsieveAsset": "pgsieve.assets.translator",
    "PgsieveComponent": "pgsieve.pipelines.component",
    "PgsieveError": "pgsieve.decoding.errors",
    "PgsieveLake": "pgsieve.assets.lake",
    "PgsieveTranslator": "pgsieve.assets.translator",
    "at_cut": "pgsieve.assets.automation_condition",
    "build_definitions": "pgsieve.pipelines.definitions",
    "read_at": "pgsieve.assets.steps.moments.reading",
    "read_at_cut": "pgsieve.assets.steps.records.cuts",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module, and keep it here, so that Python asks for it only once."""
    if name == "__version__":
        value: object = version("pgsieve")
    elif name in _MODULES:
        value = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those that no code has imported yet."""
    return sorted({*globals(), *__all__})

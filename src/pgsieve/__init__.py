"""PostgreSQL logical replication into Delta Lake, with PostgreSQL's own semantics.

For users are the names of `__all__`; everything else is private and may change with any version:

- `build_definitions(file)`: Dagster's definitions of a configuration file, for a code location of your own
- `PgsieveComponent`: the same as a component, `dg scaffold defs pgsieve.PgsieveComponent replicas`
- `PgsieveTranslator`: how its assets appear there, to subclass; `PgsieveAsset` and `AssetKind` say what an asset is of
- `PgsieveLake`: the lake as a resource, for assets that read the replicas; `at_cut(subscription)`: when to materialise them
- `read_at_cut(spark, lake, subscription)`: all tables of a subscription as they were at one LSN
- `read_at(spark, lake, subscription, moment)`: the same at any LSN or time
- `messages`: pgoutput's messages as dataclasses, with `decode` and `encode`; `Decoder` for those of a session
- `PgsieveError`: what every error of pgsieve's is, with `hint` and `sqlstate`

Importing pgsieve imports neither Spark nor Dagster: where a name comes from is imported when it is asked for.
"""

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

    #: That of the tag that was built, or of the one before and the commits since then.
    __version__: str

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
    """A public name, from the module that it lives in; kept here, so that this is asked once."""
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
    """What a user may look for."""
    return sorted({*globals(), *__all__})

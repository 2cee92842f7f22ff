"""Cloudpickle's search for loaded submodules, made once for each package.

In: a function's code, and the modules that it names. Out: as from cloudpickle, the submodules that the code
may reach through these, as `pa.compute` is by `pa`. Cloudpickle goes through all loaded modules for each of
these names of each function that it sends by value. A plan has some thousand functions, so this was most of
what it cost to send one. Raises nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType

from pyspark import cloudpickle


class _Search:
    """The loaded submodules of packages, by their names below the package."""

    def __init__(self) -> None:
        #: By packages: how many modules were loaded, and the submodules then.
        self._listed = dict[str, tuple[int, Sequence[tuple[str, frozenset[str]]]]]()

    def __call__(self, code: CodeType, named: Iterable[object]) -> list[ModuleType]:
        """The submodules that a code may reach through modules that it names."""
        words = set(code.co_names)
        return [
            sys.modules[name]
            for module in named
            if isinstance(module, ModuleType) and getattr(module, "__package__", None)
            for name, path in self._submodules(module.__name__)
            if path <= words and name in sys.modules
        ]

    def _submodules(self, package: str) -> Sequence[tuple[str, frozenset[str]]]:
        loaded, listed = len(sys.modules), self._listed.get(package)
        if listed is None or listed[0] != loaded:
            prefix = f"{package}."
            found = [
                (name, frozenset(name.removeprefix(prefix).split(".")))
                for name in tuple(sys.modules)
                if name.startswith(prefix)
            ]
            listed = self._listed[package] = loaded, found
        return listed[1]


def search_once() -> None:
    """Let pyspark's cloudpickle search this way, where it has this search."""
    module = cloudpickle.cloudpickle
    search = getattr(module, "_find_imported_submodules", None)
    if search is not None and not isinstance(search, _Search):
        module._find_imported_submodules = _Search()  # noqa: SLF001 - cloudpickle has no setting for it

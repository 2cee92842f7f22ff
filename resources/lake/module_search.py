"""Caches cloudpickle's search for loaded submodules, per package.

In: a function's code, and the modules that the code names. Out: the submodules that the code may reach through
these modules, as it reaches `pa.compute` through `pa`; the result is the same as cloudpickle's. Cloudpickle
itself searches all loaded modules, for each such module of each function that it sends by value. A plan has some
thousand functions, so the search takes most of the time to send it. Raises nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType

from pyspark import cloudpickle


class _Search:
    """The loaded submodules of packages, by their names below the package."""

    def __init__(self) -> None:
        #: For each package the number of loaded modules at the time of the search, and the package's submodules.
        self._listed = dict[str, tuple[int, Sequence[tuple[str, frozenset[str]]]]]()

    def __call__(self, code: CodeType, named_objects: Iterable[object]) -> list[ModuleType]:
        """The submodules that the code may reach through the modules that it names."""
        words = set(code.co_names)
        return [
            sys.modules[name]
            for module in named_objects
            if isinstance(module, ModuleType) and getattr(module, "__package__", None)
            for name, path in self._submodules(module.__name__)
            if path <= words and name in sys.modules
        ]

    def _submodules(self, package: str) -> Sequence[tuple[str, frozenset[str]]]:
        module_count, cached_search = len(sys.modules), self._listed.get(package)
        if cached_search is None or cached_search[0] != module_count:
            prefix = f"{package}."
            submodules = [
                (name, frozenset(name.removeprefix(prefix).split(".")))
                for name in tuple(sys.modules)
                if name.startswith(prefix)
            ]
            cached_search = self._listed[package] = module_count, submodules
        return cached_search[1]


def cache_module_search() -> None:
    """Replace the search function of pyspark's cloudpickle, if its version has one."""
    module = cloudpickle.cloudpickle
    search = getattr(module, "_find_imported_submodules", None)
    if search is not None and not isinstance(search, _Search):
        module._find_imported_submodules = _Search()  # noqa: SLF001 - cloudpickle has no setting for it

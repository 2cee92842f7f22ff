"""Caches a slow search of the library cloudpickle, with which pyspark sends functions to executors.

The code of a function that uses `pa.compute` has only the names `pa` and `compute`. cloudpickle must find out that
the executor has to import the submodule `pyarrow.compute`, too. For each function that it sends by value, and for each
module that the function names, it searches all loaded modules. A query plan of Spark has some thousand functions, so
this search takes most of the time to send the plan.

In: the code of a function, and the objects that the code names.
Out: the submodules that the code may reach. The result is the same as that of cloudpickle itself.

Raises nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType

from pyspark import cloudpickle


class _Search:
    """A search for the loaded submodules of packages. It remembers the submodules of each package."""

    def __init__(self) -> None:
        #: Maps each package to the number of modules that were loaded when it was searched, and to its submodules.
        self._cache = dict[str, tuple[int, Sequence[tuple[str, frozenset[str]]]]]()

    def __call__(self, code: CodeType, named_objects: Iterable[object]) -> list[ModuleType]:
        """The submodules that the code may reach through the modules that it names."""
        code_names = set(code.co_names)
        return [
            sys.modules[name]
            for module in named_objects
            if isinstance(module, ModuleType) and getattr(module, "__package__", None)
            for name, path in self._list_submodules(module.__name__)
            if path <= code_names and name in sys.modules
        ]

    def _list_submodules(self, package: str) -> Sequence[tuple[str, frozenset[str]]]:
        """The loaded submodules of a package, each with the set of the names that lead from the package to it.

        The cached submodules are valid as long as the number of loaded modules is the same.
        """
        module_count, cached_search = len(sys.modules), self._cache.get(package)
        if cached_search is None or cached_search[0] != module_count:
            prefix = f"{package}."
            submodules = [
                (name, frozenset(name.removeprefix(prefix).split(".")))
                for name in tuple(sys.modules)
                if name.startswith(prefix)
            ]
            cached_search = self._cache[package] = module_count, submodules
        return cached_search[1]


def cache_module_search() -> None:
    """Make pyspark's cloudpickle use the caching search. Does nothing if its version has no function to replace."""
    module = cloudpickle.cloudpickle
    search = getattr(module, "_find_imported_submodules", None)
    if search is not None and not isinstance(search, _Search):
        module._find_imported_submodules = _Search()  # noqa: SLF001 - cloudpickle has no setting for it

"""A function that is sent by value names the same submodules as with cloudpickle's own search."""

from __future__ import annotations

import concurrent.futures
import json.tool
import logging
import subprocess
import sys
from types import ModuleType

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from pyspark.cloudpickle.cloudpickle import _find_imported_submodules

from pgsieve.resources.lake import module_search

FUNCTIONS = (
    lambda: pa.compute.add(1, 2),
    lambda: concurrent.futures.thread.ThreadPoolExecutor,
    lambda: json.tool.main,
    lambda: logging.getLogger("json"),
    lambda: None,
)
FOUND = ([pc], [concurrent.futures, concurrent.futures.thread], [json.tool], [], [])
NAMED = (pa, concurrent, json, logging, "no module", None, ModuleType("without package"))


def test_it_finds_what_cloudpickle_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    search = module_search._Search()

    def compare() -> None:
        for function, expected in zip(FUNCTIONS, FOUND, strict=True):
            found = search(function.__code__, NAMED)
            assert found == _find_imported_submodules(function.__code__, NAMED)
            assert {*found} == {*expected}

    compare()
    monkeypatch.setitem(sys.modules, "json.unused", ModuleType("json.unused"))
    compare()
    monkeypatch.delitem(sys.modules, "json.unused")
    monkeypatch.setitem(sys.modules, "another", ModuleType("another"))
    compare()


def test_cloudpickle_searches_so_once_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = cloudpickle.cloudpickle
    monkeypatch.setattr(cloud, "_find_imported_submodules", cloud._find_imported_submodules)
    module_search.cache_module_search()
    module_search.cache_module_search()
    assert isinstance(cloud._find_imported_submodules, module_search._Search)
    sent = cloudpickle.dumps(FUNCTIONS[0])
    executor = "import pickle, sys; print(pickle.load(sys.stdin.buffer)().as_py())"
    assert subprocess.check_output([sys.executable, "-c", executor], input=sent) == b"3\n"

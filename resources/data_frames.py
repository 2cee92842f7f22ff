"""Keeps other libraries from importing pandas and Polars, which pgsieve's commands do not need.

pyarrow and ADBC import these two libraries if they are installed, which takes half a second.
"""

import sys

import pyarrow as pa


class _DataFrameBlocker:
    """An import finder that reports pandas and Polars as not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for pandas and Polars.

        Return None for other modules, so that the next finder searches them.

        This is the interface of finders (importlib's MetaPathFinder).
        """
        if name in {"pandas", "polars"}:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


def hide_data_frame_libraries() -> None:
    """Make pyarrow and ADBC search for pandas and Polars now, while neither can be found.

    Only pgsieve's own processes should call this. A later import of either library still works. But until pyarrow makes
    its first data frame, it treats a pandas Series like any other sequence.
    """
    finder = _DataFrameBlocker()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
        import adbc_driver_manager.dbapi  # noqa: F401
    finally:
        sys.meta_path.remove(finder)

"""Keeps libraries from importing pandas and Polars, which pgsieve's commands do not need."""

import sys

import pyarrow as pa


class _Hidden:
    """An import finder that reports pandas and Polars as missing."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for a hidden module; leave others to the next finder (importlib's MetaPathFinder)."""
        if name in {"pandas", "polars"}:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


def hide_data_frame_libraries() -> None:
    """Make pyarrow and ADBC search for pandas and Polars now, and find neither: these imports take half a second.

    Only pgsieve's own processes should call this. A later import of either library still works. Until pyarrow
    makes its first data frame, it treats a pandas Series like any other sequence.
    """
    finder = _Hidden()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
        import adbc_driver_manager.dbapi  # noqa: F401
    finally:
        sys.meta_path.remove(finder)

"""Commands need no pandas and no Polars, which libraries import where they are installed, to know their data frames if they meet one."""

import sys

import pyarrow as pa


class _Hidden:
    """Finds neither of them."""

    def find_spec(self, name: str, *_: object) -> None:
        """See importlib.abc.MetaPathFinder; raises ModuleNotFoundError for what is hidden, and leaves the rest to others."""
        if name in {"pandas", "polars"}:
            raise ModuleNotFoundError(f"{name} is not looked for", name=name)


def spare_data_frames() -> None:
    """Have pyarrow and ADBC look for pandas and Polars now, and find none: with both they take half a second.

    For a process of one's own. Who imports one of them later has it; pyarrow takes a Series for any other sequence until it has to make
    a data frame.
    """
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([])
        import adbc_driver_manager.dbapi  # noqa: F401
    finally:
        sys.meta_path.remove(hidden)

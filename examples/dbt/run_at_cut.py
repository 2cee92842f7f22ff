"""Run dbt on the newest cut: `LAKE=/srv/lake/sales python run_at_cut.py build`; the arguments are dbt's."""

import json
import os
import sys
from pathlib import Path

from deltalake import DeltaTable


def versions_at_newest_cut(lake: str) -> dict[str, int]:
    """The Delta version of each table, by its name without quotes."""
    cuts = DeltaTable(f"{lake}/_cuts").to_pyarrow_table(columns=["lsn", "at", "tables"]).to_pylist()
    newest = max(cuts, key=lambda cut: (cut["lsn"], cut["at"]))
    return {name.replace('"', ""): version for name, version in newest["tables"]}


if __name__ == "__main__":
    lake = os.environ["LAKE"].rstrip("/")
    variables = json.dumps({"lake": lake, "versions": versions_at_newest_cut(lake)})
    command = [str(Path(sys.executable).with_name("dbt")), *sys.argv[1:], "--vars", variables]
    os.chdir(Path(__file__).parent)
    os.execv(command[0], [*command, "--project-dir", ".", "--profiles-dir", "."])

"""`dagster` of pgsieve.yaml: whether Dagster runs jobs by itself."""

from pydantic import BaseModel, ConfigDict


class DagsterConfig(BaseModel):
    """`automation` switches all schedules and sensors on, and gives each cut a freshness policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    automation: bool = False

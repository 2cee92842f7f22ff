"""The section `dagster` of pgsieve.yaml: whether Dagster starts jobs without being asked."""

from pydantic import BaseModel, ConfigDict


class DagsterConfig(BaseModel):
    """With `automation`, all schedules and sensors are on, and each cut has a freshness policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    automation: bool = False

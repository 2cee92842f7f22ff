"""The section `dagster` of pgsieve.yaml: whether Dagster starts jobs without being asked."""

from pydantic import BaseModel, ConfigDict


class DagsterConfig(BaseModel):
    """With `automation`, all schedules and sensors are on, and the asset of each cut has a freshness policy.

    A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    automation: bool = False

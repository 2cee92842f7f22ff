"""The section `spark` of pgsieve.yaml: where Spark runs, with which settings.

Raises errors that become a ConfigError.
"""

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from pgsieve.pipelines.config.retention import WaitTime
from pgsieve.pipelines.config.values import (
    NonEmptyText,
    convert_false_to_off,
    make_refusal,
)
from pgsieve.resources.lake.byte_limits import REWRITTEN_BYTES_SETTING, SMALL_BYTES_SETTING
from pgsieve.resources.lake.masters import parse_thread_count


class SparkConfig(BaseModel):
    """Where Spark runs.

    - `master`: a Spark master URL or a Spark Connect address. With `threads[N]`, N threads of pgsieve replace Spark.
    - `conf`: settings of Spark
    - `engine`: whether runs use the warm engine, a Spark server that stays after a run. `use` uses it if it is running,
      `start` also starts it, and `off` does not use it. Only a local `master` can have an engine.
    - `engine_idle`: the engine ends after it has not been used for this time
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    #: These two are left out of the repr, since an address may contain credentials.
    master: NonEmptyText = Field(default="local[*]", repr=False)
    conf: dict[str, str] = Field(default={}, repr=False)
    engine: Annotated[Literal["off", "use", "start"], BeforeValidator(convert_false_to_off)] = "use"
    engine_idle: WaitTime = timedelta(minutes=15)

    @field_validator("master")
    @classmethod
    def _require_thread_count(cls, master: str) -> str:
        if master.startswith("threads") and parse_thread_count(master) is None:
            raise make_refusal(
                "does not say how many threads", "write threads[4], or threads[*] for one per core"
            )
        return master

    @field_validator("conf", mode="before")
    @classmethod
    def _convert_scalars_to_text(cls, conf: object) -> object:
        """Convert values to text, as Spark's settings are text: true becomes `true`, and 4 becomes `4`."""
        if not isinstance(conf, Mapping):
            return conf
        return {
            key: json.dumps(value) if isinstance(value, int | float) else value for key, value in conf.items()
        }

    @field_validator("conf")
    @classmethod
    def _require_byte_counts(cls, conf: dict[str, str]) -> dict[str, str]:
        for name in (SMALL_BYTES_SETTING, REWRITTEN_BYTES_SETTING):
            if name in conf and not re.fullmatch(r"-?[0-9]+", conf[name]):
                raise make_refusal(f"has {name}, which is no number of bytes", f"write {name}: 8388608")
        return conf

"""An entry of the section `sources` of pgsieve.yaml: a database, and the slot by which it is read.

Raises errors that become a ConfigError.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SecretStr,
    field_validator,
    model_validator,
)

from pgsieve.pipelines.config.publications import PublicationConfig
from pgsieve.pipelines.config.values import (
    CAPTURE_BYTES,
    CaptureName,
    ObjectName,
    has_password,
    make_refusal,
    make_slot_name,
    refuse_empty_command,
    refuse_empty_password,
    refuse_unreadable_conninfo,
)


class SourceConfig(BaseModel):
    """A database, and the replication slot by which pgsieve reads its changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = ""
    conninfo: Annotated[SecretStr, AfterValidator(refuse_unreadable_conninfo)]
    password: Annotated[SecretStr, AfterValidator(refuse_empty_password)] | None = None
    password_command: Annotated[tuple[SecretStr, ...], AfterValidator(refuse_empty_command)] | None = None
    standby: bool = False
    allow_untested_server: bool = False
    slot: str
    capture: CaptureName
    publications: dict[ObjectName, PublicationConfig] = {}

    @model_validator(mode="before")
    @classmethod
    def _derive_defaults(cls, section: object) -> object:
        if not isinstance(section, Mapping):
            return section
        name = str(section.get("name", ""))
        return {
            "slot": make_slot_name(name),
            "capture": make_slot_name(name, max_length=CAPTURE_BYTES),
            **section,
        }

    @model_validator(mode="after")
    def _refuse_two_passwords(self) -> Self:
        password_keys = [
            "password in `conninfo`" if has_password(self.conninfo) else None,
            "`password`" if self.password is not None else None,
            "`password_command`" if self.password_command is not None else None,
        ]
        if len(given_keys := [key for key in password_keys if key]) > 1:
            raise make_refusal(f"has a {' and a '.join(given_keys)}", "keep one of them")
        return self

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, slot: str) -> str:
        if not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
            raise make_refusal("is not a name for a replication slot", "a-z, 0-9 and _, 63 at most")
        return slot

"""The section `storage` of pgsieve.yaml: how to access the lake's store, and which programs write there.

In: the options in the file
Out: the `Storage` of the lake

An option that belongs to another platform, such as `account_key` for a lake at s3://, is refused. No repr and no
message contains a secret.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr

from pgsieve.pipelines.config.values import NonEmptyText, convert_to_lower_case, refuse_empty_secret
from pgsieve.resources.lake.stores.storage import OPTIONS_BY_PLATFORM, Storage, find_endpoint_problem, is_uri

_Secret = Annotated[SecretStr, AfterValidator(refuse_empty_secret)]


class StorageConfig(BaseModel):
    """How to access the lake's store.

    If an option is not given, its value comes from the environment, a profile, or the role of the machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint: NonEmptyText | None = None
    region: NonEmptyText | None = None
    access_key_id: NonEmptyText | None = None
    secret_access_key: _Secret | None = None
    session_token: _Secret | None = None
    path_style: bool | None = None
    account_key: _Secret | None = None
    sas_token: _Secret | None = None
    tenant_id: NonEmptyText | None = None
    client_id: NonEmptyText | None = None
    client_secret: _Secret | None = None
    service_account: NonEmptyText | None = None
    only_writer: Annotated[Literal["spark"] | None, BeforeValidator(convert_to_lower_case)] = None

    @property
    def options(self) -> dict[str, str]:
        """Maps the name of each option that is given to its value as text."""
        values = {name: getattr(self, name) for names in OPTIONS_BY_PLATFORM.values() for name in names}
        return {name: _to_text(value) for name, value in values.items() if value is not None}

    def make_storage(self, lake: str) -> Storage:
        """The storage of a lake, accessed with these options."""
        return Storage.from_address(lake, self.options, is_written_only_by_spark=self.only_writer == "spark")

    def find_option_problems(self, lake: str) -> Iterator[tuple[str, str, str]]:
        """Yields the name of each option that the lake's store does not have or cannot use, with a message and a hint."""
        storage = Storage.from_address(lake)
        allowed_options = OPTIONS_BY_PLATFORM.get(storage.platform or "", ())
        lake_description = f"a lake at {storage.scheme}://" if is_uri(lake) else "a lake in a folder"
        for name in self.options:
            if name not in allowed_options:
                hint = f"allowed there: {', '.join((*allowed_options, 'only_writer'))}"
                yield name, f"is not an option of {lake_description}", hint
            elif name == "endpoint" and (problem := find_endpoint_problem(self.options[name])):
                yield name, *problem
        for option, other_option in (("access_key_id", "secret_access_key"), ("client_id", "client_secret")):
            if (option in self.options) != (other_option in self.options):
                missing_option, given_option = (
                    (option, other_option) if other_option in self.options else (other_option, option)
                )
                yield given_option, f"needs {missing_option}", "give both or neither"


def _to_text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Profiles of AWS' tools are read as these tools read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.resources.lake.stores.aws_profile import AwsProfile
from pgsieve.resources.lake.stores.storage import EndpointError, Storage
from pgsieve.resources.passwords import conceal_passwords

KEYS = "aws_access_key_id = AKIA7\naws_secret_access_key = x7Qm-secret-2Lp\n"
TOKEN = "aws_session_token = t0k-en-of-an-hour\n"


class Home:
    """A home folder with the two files, and an environment that points to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, config: str = "", credentials: str = "", **environ: str) -> dict[str, str]:
        folder = self.path / ".aws"
        folder.mkdir(exist_ok=True)
        (folder / "config").write_text(config)
        (folder / "credentials").write_text(credentials)
        return {"HOME": str(self.path), **environ}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.parametrize(
    ("config", "credentials", "profile"),
    [
        ("", f"[default]\n{KEYS}", None),
        ("", f"[lake]\n{KEYS}", "lake"),
        (f"[default]\n{KEYS}", "", None),
        (f"[profile default]\n{KEYS}[default]\naws_access_key_id = other\n", "", None),
        (f"[profile lake]\n{KEYS}", "[default]\naws_access_key_id = other\n", "lake"),
        (f'[ profile  "my lake" ]\n{KEYS}', "", "my lake"),
        # The file of credentials has precedence.
        ("[profile lake]\naws_access_key_id = other\n", f"[lake]\n{KEYS}", "lake"),
        ("", f"# of the lake\n[lake] ; mine\n{KEYS.replace('AKIA7', 'AKIA7 # mine')}", "lake"),
    ],
)
def test_the_keys_of_the_chosen_profile(
    home: Home, config: str, credentials: str, profile: str | None
) -> None:
    environ = home(config, credentials, **({"AWS_PROFILE": profile} if profile else {}))
    chosen = AwsProfile.read_active(environ)
    expected = {"aws_access_key_id": "AKIA7", "aws_secret_access_key": "x7Qm-secret-2Lp"}
    assert (chosen.keys, chosen.has_credentials) == (expected, True)
    assert "secret" not in repr(chosen)


@pytest.mark.parametrize(
    "config",
    [
        "",
        KEYS,  # in no section
        f"[lake]\n{KEYS}",  # without the word "profile", which the other file omits
        f"[profile other]\n{KEYS}",
        "[profile lake]\naws_access_key_id = AKIA7\n",
        "[profile lake\n",
        "[profile lake]\n\udcff".encode(errors="surrogateescape").decode("latin-1"),
    ],
)
def test_a_profile_without_keys_gives_nothing(home: Home, config: str) -> None:
    assert AwsProfile.read_active(home(config, AWS_PROFILE="lake")).keys == {}


def test_without_a_home_or_files_there_is_no_profile(tmp_path: Path) -> None:
    assert AwsProfile.read_active({}) == AwsProfile()
    assert AwsProfile.read_active({"HOME": str(tmp_path), "AWS_CONFIG_FILE": str(tmp_path)}) == AwsProfile()


def test_files_may_be_named_relative_to_the_home(home: Home, tmp_path: Path) -> None:
    environ = home()
    (tmp_path / "mine").write_text(f"[default]\n{KEYS}")
    (tmp_path / "own").write_text("[default]\nregion = eu-1\n")
    chosen = AwsProfile.read_active(
        {**environ, "AWS_SHARED_CREDENTIALS_FILE": "~/mine", "AWS_CONFIG_FILE": "~/own"}
    )
    assert (chosen.keys["aws_access_key_id"], chosen.region) == ("AKIA7", "eu-1")
    assert AwsProfile.read_active({"AWS_SHARED_CREDENTIALS_FILE": "~/mine"}) == AwsProfile(), (
        "there is a home"
    )


@pytest.mark.parametrize(
    "elsewhere",
    [
        "role_arn = arn:aws:iam::1:role/x\nsource_profile = y\n",
        "sso_session = work\n",
        "sso_account_id = 1\n",
    ],
)
def test_a_profile_that_refers_to_another_source_gives_no_keys(home: Home, elsewhere: str) -> None:
    chosen = AwsProfile.read_active(home(f"[default]\n{elsewhere}", f"[default]\n{KEYS}"))
    assert (chosen.keys, chosen.has_credentials) == ({}, True)


@pytest.mark.parametrize(
    ("environ", "config", "endpoint"),
    [
        ({}, "[default]\nendpoint_url = http://a\n", "http://a"),
        (
            {},
            "[default]\nendpoint_url = http://a\nservices = own\n[services own]\ns3 =\n  endpoint_url = http://b\n",
            "http://b",
        ),
        (
            {},
            "[default]\nendpoint_url = http://a\nservices = own\n[services own]\nsts =\n  endpoint_url = http://b\n",
            "http://a",
        ),
        ({}, "[default]\nservices = own\n[services other]\ns3 =\n  endpoint_url = http://b\n", None),
        ({}, "[default]\ns3 =\n  addressing_style = path\n  max_queue_size = 10\nregion = eu-1\n", None),
        ({}, "[default]\nendpoint_url = http://a\nignore_configured_endpoint_urls = true\n", None),
        ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "True"}, "[default]\nendpoint_url = http://a\n", None),
        ({"AWS_ENDPOINT_URL": "http://c"}, "[default]\nendpoint_url = http://a\n", "http://c"),
    ],
)
def test_both_engines_use_the_server_of_a_profile(
    home: Home, environ: dict[str, str], config: str, endpoint: str | None
) -> None:
    environ = home(config, **environ)
    storage = Storage.from_address("s3://bucket/lake")
    assert storage.endpoint(environ) == endpoint
    assert storage.make_delta_rs_options(environ).get("aws_endpoint_url") == endpoint
    assert storage.make_spark_settings(environ).get("fs.s3a.endpoint") == endpoint
    assert (
        Storage.from_address("s3://bucket/lake", {"endpoint": "http://own"}).endpoint(environ) == "http://own"
    )
    assert Storage.from_address("abfss://lake@shop.dfs.core.windows.net/x").endpoint(environ) is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "http://AKIA7:x7Qm-secret-2Lp@minio:9000"])
@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "`endpoint_url`"]
)
def test_an_invalid_address_is_refused_with_its_place(home: Home, name: str, endpoint: str) -> None:
    environ = home(f"[default]\nendpoint_url = {endpoint}\n")
    if name.startswith("AWS_"):
        environ = home(**{name: endpoint})
    storage = Storage.from_address("s3://bucket/lake")
    for method in (
        storage.endpoint,
        storage.make_delta_rs_options,
        storage.make_spark_settings,
        storage.is_s3_imitation,
    ):
        with pytest.raises(EndpointError) as caught:
            method(environ)
        assert caught.value.message.startswith(f'lake "s3a://bucket/lake": {name} ')
        assert "http://HOST:PORT" in str(caught.value.hint)
        assert "secret-2Lp" not in str(caught.value)


def test_delta_rs_gets_the_profile_that_it_does_not_read_itself(home: Home) -> None:
    storage = Storage.from_address("s3://bucket/lake")
    config = "[default]\nregion = eu-central-1\n"
    kept = storage.make_delta_rs_options(home(config, f"[default]\n{KEYS}"))
    assert (kept["aws_access_key_id"], kept["aws_region"]) == ("AKIA7", "eu-central-1")
    assert "secret" not in conceal_passwords("x7Qm-secret-2Lp")
    # delta-rs reads temporary credentials itself, again and again, if it reads them at all.
    ending = home(config, f"[default]\n{KEYS}{TOKEN}")
    assert "aws_access_key_id" not in storage.make_delta_rs_options(ending)
    with_endpoint = Storage.from_address(
        "s3://bucket/lake", {"endpoint": "http://own", "region": "us-1"}
    ).make_delta_rs_options(ending)
    assert (with_endpoint["aws_session_token"], with_endpoint["aws_region"]) == ("t0k-en-of-an-hour", "us-1")


@pytest.mark.parametrize("before", ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"])
def test_credentials_of_the_environment_precede_a_profile(home: Home, before: str) -> None:
    environ = home("", f"[default]\n{KEYS}", **{before: "x"})
    assert "aws_access_key_id" not in Storage.from_address("s3://bucket/lake").make_delta_rs_options(environ)
    given = Storage.from_address("s3://bucket/lake", {"access_key_id": "own", "secret_access_key": "s"})
    options = given.make_delta_rs_options(home("", f"[default]\n{KEYS}{TOKEN}"))
    assert options["aws_access_key_id"] == "own"
    assert "aws_session_token" not in options

"""Settings of S3 in the files of the AWS command line: which are used, and what goes before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.store.buckets import profile_settings

CREDENTIALS = """
[default]
aws_access_key_id = ours
aws_secret_access_key = secret
[spot]
aws_access_key_id = spots
aws_secret_access_key = hidden
aws_session_token = token
"""
CONFIG = """
[default]
region = eu-central-1
s3 =
    addressing_style = path
[profile spot]
region = us-west-2
endpoint_url = http://host:9000
ca_bundle = /ca.pem
[profile single]
sso_session = all
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    files = {"AWS_SHARED_CREDENTIALS_FILE": CREDENTIALS, "AWS_CONFIG_FILE": CONFIG}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in files}


def test_the_default_profile_is_used(environ):
    assert profile_settings(environ) == {
        "aws_access_key_id": "ours",
        "aws_secret_access_key": "secret",
        "region": "eu-central-1",
    }


def test_another_one_is_named_in_the_environment(environ):
    assert profile_settings(environ | {"AWS_PROFILE": "spot"}) == {
        "aws_access_key_id": "spots",
        "aws_secret_access_key": "hidden",
        "aws_session_token": "token",
        "region": "us-west-2",
        "endpoint": "http://host:9000",
        "ca_bundle": "/ca.pem",
    }


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, {"region", "endpoint", "ca_bundle"}),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "f", "AWS_DEFAULT_REGION": "r"}, {"endpoint", "ca_bundle"}),
        ({"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "r", "AWS_ENDPOINT_URL_S3": "http://h"}, {"ca_bundle"}),
    ],
)
def test_the_environment_goes_before_the_profile(environ, variables, left):
    found = profile_settings(environ | {"AWS_PROFILE": "spot", "AWS_CA_BUNDLE": "/other.pem"} | variables)
    assert found.keys() == left
    assert found["ca_bundle"] == "/other.pem"


def test_without_files_there_is_nothing(tmp_path):
    assert (
        profile_settings({name: str(tmp_path / "none") for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")})
        == {}
    )


@pytest.mark.parametrize(
    ("profile", "complaint"),
    [
        ("nobody", "AWS_PROFILE: found nobody, which is neither in the credentials file nor in the config"),
        ("single", "profile single of ~/.aws has sso_session .*aws configure export-credentials --profile single"),
    ],
)
def test_a_profile_that_has_no_keys_is_refused(environ, profile, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        profile_settings(environ | {"AWS_PROFILE": profile})


def test_one_with_credentials_elsewhere_is_not_in_the_way_of_keys_in_the_environment(environ):
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    assert profile_settings(environ | keys | {"AWS_PROFILE": "single"}) == {}


def test_a_file_that_is_none_of_these_is_named(environ):
    Path(environ["AWS_CONFIG_FILE"]).write_text("region = nowhere")
    with pytest.raises(ConfigurationError, match="AWS_CONFIG_FILE: cannot be read: File contains no section headers"):
        profile_settings(environ)

"""Settings of S3 that are in the files of the AWS command line, ``~/.aws/credentials`` and ``~/.aws/config``.

Owns which of them are used: obstore reads only the environment, which goes before them. Called by
`parashard.store.buckets`.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

from parashard.errors import ConfigurationError

_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_ELSEWHERE = ("credential_process", "role_arn", "sso_session", "sso_start_url", "web_identity_token_file")
"""What says that a profile's credentials come from another program or service."""
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def profile_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the profile says and the environment does not: keys, ``region``, ``endpoint``, ``ca_bundle``.

    The profile is ``AWS_PROFILE``, or `default`; the files are where ``AWS_CONFIG_FILE`` and
    ``AWS_SHARED_CREDENTIALS_FILE`` say.

    Raises
    ------
    ConfigurationError
        If a file or the profile cannot be used.
    """
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    credentials = _section(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", name)
    section = name if name == "default" else f"profile {name}"
    config = _section(environ.get("AWS_CONFIG_FILE") or "~/.aws/config", section)
    if credentials is None and config is None and name != "default":
        raise ConfigurationError(
            f"AWS_PROFILE: found {name}, which is neither in the credentials file nor in the config"
        )
    profile = (config or {}) | (credentials or {})
    settings = {}
    if not any(environ.get(variable) for variable in _OWN_CREDENTIALS):
        settings = {key: profile[key] for key in _KEYS if profile.get(key)}
        elsewhere = [key for key in _ELSEWHERE if profile.get(key)]
        if not settings and elsewhere:
            raise ConfigurationError(
                f"profile {name} of ~/.aws has {elsewhere[0]} in place of keys, which we cannot use; export its keys: "
                f'eval "$(aws configure export-credentials --profile {name} --format env)"'
            )
    for setting, key, variables in (
        ("region", "region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
        ("endpoint", "endpoint_url", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
    ):
        if profile.get(key) and not any(environ.get(variable) for variable in variables):
            settings[setting] = profile[key]
    authority = environ.get("AWS_CA_BUNDLE") or profile.get("ca_bundle")
    return settings | ({"ca_bundle": authority} if authority else {})


def _section(file: str, name: str) -> dict[str, str] | None:
    """Return a section of a file; None if there is none."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(file).expanduser(), "utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    return dict(parser.items(name)) if parser.has_section(name) else None

"""Buckets of object stores, called by obstore.

Owns the clients' settings, the deadline of a call, and the translation of obstore's errors. Does not know what is
stored.

Each call runs on its own thread: obstore handles no signal before it returns, and the main thread must handle them.
obstore's clients do not survive a fork: a process opens its own.
"""

from __future__ import annotations

import configparser
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parashard.errors import ConfigurationError, StoreFailed
from parashard.process.extras import install

if TYPE_CHECKING:
    from obstore import store as obstores

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
"""Until the answer begins, and between two parts of it; an upload in one request has only `REQUEST_TIMEOUT_S`."""
RETRIES_MAX = 2
REQUEST_TIMEOUT_S = 240
"""Of one request with its content: long enough for 256 MiB at 1.1 MiB/s."""
RETRIED_FOR_S = 45
"""No request is retried later than this after the first attempt."""
CALL_DEADLINE_S = 300.0
"""Above the sum of the two before it: a create has ended then, and nothing reads the caller's memory any more."""
CAUSE_CHARACTERS_MAX = 400

EXTRAS = {"az": "azure", "gs": "gcs", "s3": "s3"}
"""The extra of each scheme; all bring obstore."""

_CREDENTIALS = {
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
_METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal")
_XML_MESSAGE = re.compile(r"<Message>(.+?)</Message>", re.DOTALL)
_BELOW = re.compile(r'(?:message|error): "([^"]+)"|(TimedOut|InvalidCertificate)')
"""The cause of a failed request, which obstore has only in the debug part of an error's text."""
_BELOW_WORDS = {"TimedOut": "timed out", "InvalidCertificate": "its certificate is not trusted"}

_Returned = TypeVar("_Returned")
_memory: dict[str, obstores.MemoryStore] = {}


class Bucket:
    """A bucket, by a URL such as ``s3://BUCKET/FOLDER``. Making it sends no request. Safe to use from many threads.

    Large uploads in one request go through `uploads`, whose requests may take `REQUEST_TIMEOUT_S`; all else through
    `requests`.
    """

    def __init__(self, url: str) -> None:
        self.scheme, _, root = url.partition("://")
        root = root.strip("/")
        name, _, self.folder = root.partition("/")
        if not name:
            raise ConfigurationError(f"{url}: names no bucket: {self.scheme}://BUCKET/FOLDER")
        self.url = f"{self.scheme}://{root}"
        try:
            import obstore  # noqa: F401 -- here: a folder has no use for it
        except ImportError as error:
            extra = EXTRAS.get(self.scheme, "s3")
            raise ConfigurationError(f"{url}: obstore is not installed: {install(extra)}") from error
        try:
            self.requests = _client(self.scheme, name, READ_TIMEOUT_S)
            self.uploads = _client(self.scheme, name, REQUEST_TIMEOUT_S)
        except Exception as error:  # obstore's errors of settings have no common base
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"{self.url}: {self._cause(error)}") from None

    def call(self, doing: str, call: Callable[..., _Returned], *arguments: Any, **options: Any) -> _Returned:
        """Call obstore, within `CALL_DEADLINE_S`."""
        answer: Future[_Returned] = Future()

        def run() -> None:
            try:
                answer.set_result(call(*arguments, **options))
            except BaseException as error:  # noqa: BLE001 -- raised again by the thread that waits
                answer.set_exception(error)

        try:
            threading.Thread(target=run, name="object-store", daemon=True).start()
            return answer.result(CALL_DEADLINE_S)
        except Exception as error:
            raise StoreFailed(f"{self.url}: cannot {doing}: {self._cause(error)}") from error

    def _cause(self, error: Exception) -> str:
        """Return an error of obstore in a sentence: the server's message, or the cause below the request."""
        if isinstance(error, TimeoutError):
            return f"no answer within {CALL_DEADLINE_S:.0f} s"
        told, _, below = str(error).partition("\n\nDebug source")
        said = _XML_MESSAGE.search(told)
        deepest = _BELOW.search(below)
        text = " ".join(told.split()) or type(error).__name__
        if said:
            text = " ".join(said[1].split())
        elif deepest and "HTTP error" in told:
            text += f" ({(deepest[1] or _BELOW_WORDS[deepest[2]]).lower()})"
        text = text[:CAUSE_CHARACTERS_MAX]
        if any(service in told for service in _METADATA_SERVICES):
            return f"no credentials: set {_CREDENTIALS[self.scheme]}, or run where there is a metadata service ({text})"
        if "redirect" in told.lower() and self.scheme == "s3":
            return f"the bucket is in another region: set AWS_DEFAULT_REGION ({text})"
        return text


def _client(scheme: str, name: str, read_timeout_s: int) -> obstores.ObjectStore:
    """Return obstore's client of a bucket; credentials and endpoint come from the environment."""
    from obstore import store

    client: obstores.ClientConfig = {
        "allow_http": True,  # an endpoint may have http://
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=read_timeout_s),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }
    retries: obstores.RetryConfig = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRIED_FOR_S)}
    if scheme == "memory":
        return _memory.setdefault(name, store.MemoryStore())
    if scheme == "gs":
        return store.GCSStore(name, client_options=client, retry_config=retries)
    if scheme == "az":
        return store.AzureStore(name, client_options=client, retry_config=retries)
    if scheme in ("http", "https"):
        return store.HTTPStore.from_url(f"{scheme}://{name}", client_options=client, retry_config=retries)
    settings: Any = profile_settings(os.environ)
    authority = settings.pop("ca_bundle", None)
    if authority:
        client["root_certificate"] = _certificate(authority)
    return store.S3Store(name, config=settings, client_options=client, retry_config=retries)


def _certificate(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"AWS_CA_BUNDLE: {path} cannot be read: {error.strerror}") from None


_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_ELSEWHERE = ("credential_process", "role_arn", "sso_session", "sso_start_url", "web_identity_token_file")
"""Keys of a profile whose credentials come from another program or service."""
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def profile_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the profile's settings that the environment lacks: keys, ``region``, ``endpoint``, ``ca_bundle``."""
    # The profile is ``AWS_PROFILE``, or `default`; ``AWS_CONFIG_FILE`` and ``AWS_SHARED_CREDENTIALS_FILE`` may name the
    # files.
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

"""`parashard certs`: an authority, a folder for a process, and one line for every mistake."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from parashard.cli import app
from parashard.errors import ConfigurationError
from parashard.security.credentials import Credentials


def certs(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_two_commands_make_credentials(tmp_path: Path) -> None:
    assert "an authority for 365 days" in certs("init", tmp_path / "ca")
    said = certs("issue", tmp_path / "ca", tmp_path / "tls", "--role", "shard", "--role", "worker", "--name", "a")
    assert said == f"{tmp_path / 'tls'}: shard/a, worker/a, for 30 days\n"
    assert [str(identity) for identity in Credentials(tmp_path / "tls").identities] == ["shard/a", "worker/a"]


def test_without_a_name_it_is_the_roles(tmp_path: Path) -> None:
    certs("init", tmp_path / "ca")
    assert "operator/operator, for 2 days" in certs(
        "issue", tmp_path / "ca", tmp_path / "tls", "--role", "operator", "--valid-days", 2
    )


@pytest.mark.parametrize("arguments", [["--role", "king"], [], ["--role", "worker", "--valid-days", 0]])
def test_what_cannot_be_issued_is_refused(tmp_path: Path, arguments: list[object]) -> None:
    assert "Usage:" in certs("issue", tmp_path / "ca", tmp_path / "tls", *arguments)
    assert not (tmp_path / "tls").exists()


def test_a_second_authority_is_refused(tmp_path: Path) -> None:
    certs("init", tmp_path)
    with pytest.raises(ConfigurationError, match="has an authority already"):
        certs("init", tmp_path)

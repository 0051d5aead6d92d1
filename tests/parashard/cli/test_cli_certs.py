"""`parashard certs`: an authority, a folder for a process, and one line for every mistake."""

import ipaddress
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from parashard.cli.main import app
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


def test_a_script_and_its_workers_get_a_folder_each(tmp_path: Path) -> None:
    for _ in ("made", "renewed"):
        certs("script", tmp_path / "ca", tmp_path / "tls", "--host", "train.example")
    folders = {path.name: Credentials(path) for path in (tmp_path / "tls").iterdir()}
    found = {name: {str(one.role) for one in of.identities} for name, of in folders.items()}
    assert found == {"train.example": {"coordinator", "shard", "worker", "operator"}, "worker": {"worker"}}
    served = x509.load_pem_x509_certificate((tmp_path / "tls" / "train.example" / "cert.pem").read_bytes())
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "train.example" in names.get_values_for_type(x509.DNSName)


def test_a_host_may_be_this_machine_whatever_its_address_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.9.8.7")
    certs("init", tmp_path / "ca")
    certs("issue", tmp_path / "ca", tmp_path / "tls", "--role", "shard", "--host", "auto")
    issued = x509.load_pem_x509_certificate((tmp_path / "tls" / "cert.pem").read_bytes())
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ipaddress.ip_address("10.9.8.7") in names.get_values_for_type(x509.IPAddress)


def test_without_a_name_it_is_the_roles(tmp_path: Path) -> None:
    certs("init", tmp_path / "ca")
    assert "operator/operator, for 2 days" in certs(
        "issue", tmp_path / "ca", tmp_path / "tls", "--role", "operator", "--valid-days", 2
    )


def test_a_validity_that_its_authority_cuts_is_reported(tmp_path: Path) -> None:
    certs("init", tmp_path / "ca", "--valid-days", 5)
    ends = x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.pem").read_bytes()).not_valid_after_utc
    expected = f", until {ends:%Y-%m-%d %H:%M:%S} UTC, when the authority expires\n"
    assert certs("issue", tmp_path / "ca", tmp_path / "tls", "--role", "worker").endswith(expected)
    assert certs("cluster", tmp_path / "ca", tmp_path / "all", "--shards", 1).endswith(expected)


@pytest.mark.parametrize("arguments", [["--role", "king"], [], ["--role", "worker", "--valid-days", 0]])
def test_what_cannot_be_issued_is_refused(tmp_path: Path, arguments: list[object]) -> None:
    assert "Usage:" in certs("issue", tmp_path / "ca", tmp_path / "tls", *arguments)
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("init", ""),
        ("issue", "ca", "", "--role", "worker"),
        ("issue", "", "tls", "--role", "worker"),
        ("cluster", "ca", "", "--shards", 1),
        ("cluster", "", "tls", "--shards", 1),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    certs("init", "ca")
    assert "found ''; allowed: a folder" in certs(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["ca"]


def test_a_second_authority_is_refused(tmp_path: Path) -> None:
    certs("init", tmp_path)
    with pytest.raises(ConfigurationError, match="has an authority already"):
        certs("init", tmp_path)


def test_one_command_makes_what_a_cluster_needs_and_renews_it(tmp_path: Path) -> None:
    command = ("cluster", tmp_path / "ca", tmp_path / "tls", "--shards", 2)
    assert certs(*command).endswith("shard/shard-1, operator/operator, for 30 days\n")
    authority = (tmp_path / "ca" / "ca.pem").read_bytes()
    names = ["coordinator", "operator", "shard-0", "shard-1", "worker"]
    assert sorted(folder.name for folder in (tmp_path / "tls").iterdir()) == names
    assert [len(Credentials(tmp_path / "tls" / name).identities) for name in names] == [1] * 5
    first = {name: (tmp_path / "tls" / name / "cert.pem").read_bytes() for name in names}
    certs(*command)
    assert (tmp_path / "ca" / "ca.pem").read_bytes() == authority
    assert all((tmp_path / "tls" / name / "cert.pem").read_bytes() != first[name] for name in names)


def test_a_cluster_goes_on_with_an_authority_that_a_kill_left_without_its_certificate(tmp_path: Path) -> None:
    command = ("cluster", tmp_path / "ca", tmp_path / "tls", "--shards", 1)
    certs(*command)
    (tmp_path / "ca" / "ca.pem").unlink()
    certs(*command)
    assert Credentials(tmp_path / "tls" / "shard-0").identities


def test_who_is_connected_to_has_the_folders_name_as_its_host(tmp_path: Path) -> None:
    certs("cluster", tmp_path / "ca", tmp_path / "tls", "--shards", 1)
    hosts = {
        name: x509.load_pem_x509_certificate((tmp_path / "tls" / name / "cert.pem").read_bytes())
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value.get_values_for_type(x509.DNSName)
        for name in ("coordinator", "shard-0", "worker")
    }
    assert hosts == {"coordinator": ["localhost", "coordinator"], "shard-0": ["localhost", "shard-0"], "worker": []}


def test_a_host_for_a_role_without_a_server_is_refused(tmp_path: Path) -> None:
    certs("init", tmp_path / "ca")
    with pytest.raises(ConfigurationError, match=r"--host a: worker/worker is not a server; allowed for: .*shard"):
        certs("issue", tmp_path / "ca", tmp_path / "tls", "--role", "worker", "--host", "a")
    assert not (tmp_path / "tls").exists()


def test_the_authority_of_a_cluster_is_valid_for_ten_years(tmp_path: Path) -> None:
    certs("cluster", tmp_path / "ca", tmp_path / "tls", "--shards", 1)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.pem").read_bytes())
    assert (authority.not_valid_after_utc - datetime.now(UTC)).days in (3649, 3650)


def test_a_cluster_keeps_the_authorities_that_it_trusted_if_asked(tmp_path: Path) -> None:
    for authority in ("old", "new"):
        certs("cluster", tmp_path / authority, tmp_path / "tls", "--shards", 1, "--keep-ca")
    both = b"".join((tmp_path / authority / "ca.pem").read_bytes() for authority in ("new", "old"))
    folders = list((tmp_path / "tls").iterdir())
    assert [(folder / "ca.pem").read_bytes() for folder in folders] == [both] * 4

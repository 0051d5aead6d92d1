"""What certificates of our own authority say, and that only their owner can read keys."""

import errno
import os
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from parashard.errors import ConfigurationError
from parashard.security.certs import has_authority, issue, make_authority
from parashard.security.credentials import load
from parashard.security.identity import Identity, Role

WORKER, SHARD = Identity(Role.WORKER, "worker-7"), Identity(Role.SHARD, "shard-1")


@pytest.fixture
def authority(tmp_path):
    make_authority(tmp_path / "ca", valid_days=2)
    return tmp_path / "ca"


def issued(authority, *identities, **more) -> x509.Certificate:
    output = authority.parent / "tls"
    issue(authority, output, identities, valid_days=1, **more)
    return x509.load_pem_x509_certificate((output / "cert.pem").read_bytes())


def names(certificate: x509.Certificate, kind) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name) for name in found.get_values_for_type(kind)]


def usages(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_worker_is_named_by_a_uri_and_cannot_serve(authority):
    certificate = issued(authority, WORKER)
    assert names(certificate, x509.UniformResourceIdentifier) == ["parashard://worker/worker-7"]
    assert names(certificate, x509.DNSName) == []
    assert usages(certificate) == {ExtendedKeyUsageOID.CLIENT_AUTH}


def test_a_shard_serves_at_the_names_that_were_asked_for_and_on_loopback(authority):
    certificate = issued(authority, SHARD, hosts=["shard-1.shards", "10.1.2.3", "localhost"])
    assert names(certificate, x509.DNSName) == ["localhost", "shard-1.shards"]
    assert names(certificate, x509.IPAddress) == ["127.0.0.1", "::1", "10.1.2.3"]
    assert usages(certificate) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


def test_one_certificate_may_have_several_roles(authority):
    issued(authority, WORKER, SHARD)
    assert load(authority.parent / "tls").identities == (WORKER, SHARD)


def test_keys_are_for_this_user_alone_and_nothing_else_is_left(authority):
    issued(authority, WORKER)
    folder = authority.parent / "tls"
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    for key in (authority / "ca-key.pem", folder / "key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_authority_signs_no_other_authority(authority):
    ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    issued(authority, WORKER).verify_directly_issued_by(ca)


def test_an_authority_is_not_replaced(authority):
    before = (authority / "ca-key.pem").read_bytes()
    with pytest.raises(ConfigurationError, match="has an authority already"):
        make_authority(authority, valid_days=1)
    assert (authority / "ca-key.pem").read_bytes() == before


class Killed(BaseException):
    """Stands for a process that is killed."""


class TestHalfAnAuthority:
    """Is finished where that is possible, and else it is said what to do."""

    @pytest.mark.parametrize("renamed", [0, 1])
    def test_that_a_kill_left_is_finished_by_the_next_call(self, tmp_path, monkeypatch, renamed):
        calls = []

        def replace(source: str, target: object, really=os.replace) -> None:
            calls.append(target)
            if len(calls) > renamed:
                raise Killed
            really(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            with pytest.raises(Killed):
                make_authority(tmp_path / "ca", valid_days=1)
        assert not has_authority(tmp_path / "ca")
        key = tmp_path / "ca" / "ca-key.pem"
        before = key.read_bytes() if key.exists() else None
        assert (before is not None) == bool(renamed)
        make_authority(tmp_path / "ca", valid_days=1)
        assert has_authority(tmp_path / "ca")
        assert before in (None, key.read_bytes())
        issued(tmp_path / "ca", WORKER)
        assert load(tmp_path / "tls").identities == (WORKER,)

    def test_is_on_the_disk_in_the_order_in_which_it_is_made(self, tmp_path, monkeypatch):
        done = []

        def note(what: str, really):
            def noted(*arguments):
                name = Path(f"/proc/self/fd/{arguments[0]}").readlink() if what == "fsync" else arguments[1]
                done.append(f"{what} {name.stem if name.name.startswith('.') else name.name}")
                return really(*arguments)

            return noted

        for what in ("fsync", "replace"):
            monkeypatch.setattr(os, what, note(what, getattr(os, what)))
        make_authority(tmp_path / "ca", valid_days=1)
        key = ["fsync .ca-key.pem", "replace ca-key.pem", "fsync ca"]
        assert done == [*key, "fsync .ca.pem", "replace ca.pem", "fsync ca"]

    def test_without_its_certificate_is_named_with_the_command_that_helps(self, authority):
        before = issued(authority, WORKER)
        (authority / "ca.pem").unlink()
        with pytest.raises(ConfigurationError, match=r"ca\.pem: No such file .*; `parashard certs init` makes it"):
            issued(authority, WORKER)
        make_authority(authority, valid_days=2)
        before.verify_directly_issued_by(x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes()))

    def test_without_its_key_is_refused_by_every_command_with_one_advice(self, authority):
        (authority / "ca-key.pem").unlink()
        before = (authority / "ca.pem").read_bytes()
        advice = r"ca has ca\.pem and no ca-key\.pem; put its key back, or make an authority in another folder"
        with pytest.raises(ConfigurationError, match=advice):
            make_authority(authority, valid_days=1)
        with pytest.raises(ConfigurationError, match=advice):
            issued(authority, WORKER)
        assert (authority / "ca.pem").read_bytes() == before


class TestKeptAuthorities:
    """What a folder trusts besides the issuer while the authority changes."""

    @pytest.fixture
    def other(self, tmp_path):
        make_authority(tmp_path / "other", valid_days=1)
        return tmp_path / "other"

    def test_are_those_of_before_once_each_and_the_issuer_comes_first(self, authority, other):
        issued(other, WORKER)
        for _ in range(2):
            issued(authority, WORKER, keep_ca=True)
            expected = [(folder / "ca.pem").read_bytes() for folder in (authority, other)]
            assert (authority.parent / "tls" / "ca.pem").read_bytes() == b"".join(expected)
        issued(authority, WORKER)
        assert (authority.parent / "tls" / "ca.pem").read_bytes() == expected[0]

    def test_are_none_in_a_new_folder(self, authority):
        issued(authority, WORKER, keep_ca=True)
        assert (authority.parent / "tls" / "ca.pem").read_bytes() == (authority / "ca.pem").read_bytes()

    def test_are_dropped_once_they_have_expired(self, authority, other):
        issued(other, WORKER)
        issued(authority, WORKER, keep_ca=True, now=datetime.now(UTC) + timedelta(days=1.5))
        assert (authority.parent / "tls" / "ca.pem").read_bytes() == (authority / "ca.pem").read_bytes()

    def test_that_others_may_have_written_are_refused(self, authority):
        issued(authority, WORKER)
        (authority.parent / "tls" / "ca.pem").chmod(0o666)
        with pytest.raises(ConfigurationError, match=r"tls/ca\.pem: its mode is 0666; allowed: no writing but"):
            issued(authority, WORKER, keep_ca=True)

    def test_that_cannot_be_read_are_named_and_nothing_is_written(self, authority):
        issued(authority, WORKER)
        before = (authority.parent / "tls" / "cert.pem").read_bytes()
        (authority.parent / "tls" / "ca.pem").write_text("hello")
        with pytest.raises(
            ConfigurationError, match=r"tls/ca\.pem has no certificate that can be read, .* needed: PEM"
        ):
            issued(authority, WORKER, keep_ca=True)
        assert (authority.parent / "tls" / "cert.pem").read_bytes() == before


class TestARenewedFile:
    """Is for the same user, group and others as the one that it replaces: who renews need not be who reads."""

    FILES = ("ca.pem", "cert.pem", "key.pem")

    @pytest.fixture
    def folder(self, authority, tmp_path):
        issued(authority, WORKER)
        return tmp_path / "tls"

    @pytest.mark.parametrize(
        ("before", "after"), [(0o600, 0o600), (0o440, 0o440), (0o640, 0o640), (0o666, 0o640), (0o6660, 0o640)]
    )
    def test_has_the_mode_of_before_without_what_no_key_may_have(self, authority, folder, before, after):
        (folder / "key.pem").chmod(before)
        issued(authority, WORKER)
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == after
        assert load(folder)

    @pytest.mark.parametrize(("before", "after"), [(0o644, 0o644), (0o440, 0o440), (0o666, 0o644)])
    def test_of_certificates_is_writable_by_its_owner_only(self, authority, folder, before, after):
        (folder / "ca.pem").chmod(before)
        issued(authority, WORKER)
        assert stat.S_IMODE((folder / "ca.pem").stat().st_mode) == after

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_is_its_owners_if_root_renews(self, authority, folder):
        (folder / "key.pem").chmod(0o640)
        for name in self.FILES:
            os.chown(folder / name, 65534, 65533)
        issued(authority, WORKER)
        found = [(folder / name).stat() for name in self.FILES]
        assert [(file.st_uid, file.st_gid) for file in found] == [(65534, 65533)] * 3
        assert stat.S_IMODE(found[-1].st_mode) == 0o640

    @pytest.mark.parametrize(("refused", "mode"), [("user", 0o640), ("group", 0o600)])
    def test_that_cannot_be_given_to_its_group_is_for_no_other(self, authority, folder, monkeypatch, refused, mode):
        asked = []

        def fchown(number: int, user: int, group: int) -> None:
            asked.append((user, group))
            if refused == "group" or user != -1:
                raise PermissionError(errno.EPERM, "Operation not permitted")

        (folder / "key.pem").chmod(0o640)
        mine = (folder / "key.pem").stat()
        monkeypatch.setattr(os, "fchown", fchown)
        issued(authority, WORKER)
        assert asked == [(mine.st_uid, mine.st_gid), (-1, mine.st_gid)] * 3
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == mode


@pytest.mark.parametrize("written", ["", ".", "../ca", "link"])
def test_a_processs_key_is_not_put_beside_the_authoritys(authority, written):
    (authority / "link").symlink_to(authority)
    before = sorted(authority.iterdir())
    with pytest.raises(ConfigurationError, match=r"is the authority's own folder, .*; allowed: another"):
        issue(authority, authority / written, [WORKER], valid_days=1)
    assert sorted(authority.iterdir()) == before


def test_a_full_disk_leaves_the_key_and_the_certificate_of_before(authority, tmp_path, monkeypatch):
    before, real = issued(authority, WORKER), os.fsync

    def fsync(number):
        if "/.cert.pem." in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigurationError, match=r"tls/cert\.pem cannot be written: No space left on device"):
        issued(authority, SHARD)
    assert load(tmp_path / "tls").identities == (WORKER,)
    assert x509.load_pem_x509_certificate((tmp_path / "tls" / "cert.pem").read_bytes()) == before
    assert sorted(os.listdir(tmp_path / "tls")) == ["ca.pem", "cert.pem", "key.pem"]


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a b", "x" * 64, "é"])
def test_a_name_that_could_be_read_as_another_is_refused(authority, name):
    with pytest.raises(ConfigurationError, match="allowed: up to 63 letters"):
        issued(authority, Identity(Role.WORKER, name))


NO_HOSTS = ["münchen", "shard-0:7000", "[::1]", "a..b", ".a", "a.", "-a", "a-", "a/b", "a,b", "a b", "a\n", ""]
NO_HOSTS += ["300.1.1.1", "1", "*", "*.shards", "a.*.b.c", "w*.a.b", "*.*.a.b", "x" * 64, "a." * 126 + "ab"]


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_no_host_is_refused(authority, host):
    with pytest.raises(ConfigurationError, match="is neither an address nor a name of DNS; allowed: labels"):
        issued(authority, SHARD, hosts=[host])
    assert not (authority.parent / "tls").exists()


def test_names_of_one_label_and_of_many_and_wildcards_with_two_below_are_hosts(authority):
    hosts = ["shard-0", "job_shard_1", "1.example", "*.shards.svc", "x" * 63, "a." * 126 + "a", "::2"]
    assert names(issued(authority, SHARD, hosts=hosts), x509.DNSName) == ["localhost", *hosts[:-1]]


def test_without_an_authority_it_says_how_to_get_one(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"ca\.pem: No such file or directory; `parashard certs init` makes it"
    ):
        issue(tmp_path, tmp_path / "tls", [WORKER], valid_days=1)


def test_an_authority_that_has_expired_issues_nothing(authority):
    with pytest.raises(
        ConfigurationError, match=r"ca/ca\.pem expired at .* UTC: .*; make an authority in another folder"
    ):
        issued(authority, WORKER, now=datetime.now(UTC) + timedelta(days=3))
    assert not (authority.parent / "tls").exists()


def test_a_damaged_authority_is_named(authority):
    (authority / "ca-key.pem").write_text("not a key")
    with pytest.raises(
        ConfigurationError, match=r"ca-key\.pem cannot be read; needed: PEM, -----BEGIN PRIVATE KEY-----"
    ):
        issued(authority, WORKER)
    (authority / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigurationError, match=r"ca/ca\.pem has no certificate that can be read, .* needed: PEM"):
        issued(authority, WORKER)


def test_an_authority_whose_key_is_anothers_issues_nothing(authority, tmp_path):
    make_authority(tmp_path / "other", valid_days=2)
    shutil.copy(tmp_path / "other" / "ca-key.pem", authority / "ca-key.pem")
    with pytest.raises(ConfigurationError, match=r"ca: ca\.pem and ca-key\.pem do not match: .* another folder"):
        issued(authority, WORKER)
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_an_authority_whose_key_is_open_to_others_issues_nothing(authority, tmp_path, mode):
    (authority / "ca-key.pem").chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"ca/ca-key\.pem: its mode is {mode:04o}; allowed: "):
        issued(authority, WORKER)
    assert not (tmp_path / "tls").exists()


def test_nothing_that_is_issued_outlives_its_authority(authority, tmp_path):
    ends = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes()).not_valid_after_utc
    assert issue(authority, tmp_path / "tls", [WORKER], valid_days=3) == ends
    assert load(tmp_path / "tls").expires == ends
    assert x509.load_pem_x509_certificate((tmp_path / "tls" / "cert.pem").read_bytes()).not_valid_after_utc == ends
    assert issue(authority, tmp_path / "tls", [WORKER], valid_days=1) is None
    assert load(tmp_path / "tls").expires < ends

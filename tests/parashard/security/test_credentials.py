"""A folder of credentials: every fault of it in words, and new files without a restart."""

import errno
import itertools
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from parashard.errors import ConfigurationError, ParashardError, Unavailable
from parashard.security import credentials
from parashard.security.certs import issue, make_authority
from parashard.security.credentials import LOOK_S, SETTLE_S, WARN_EVERY_S, Credentials, load
from parashard.security.identity import Identity, Role
from support.certificates import EXPIRED, Certificates
from support.logs import capture_logs

NOW_S = 100.0


@pytest.fixture
def folder(certificates: Certificates, tmp_path: Path) -> Path:
    """Return a folder of this test's own."""
    return Path(shutil.copytree(certificates.folder(Role.WORKER), tmp_path / "tls"))


@pytest.fixture
def replaced_when_read(
    certificates: Certificates, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Return what has the files replaced once the one of a name was read, so many times; it returns the names read."""

    def arm(name: str, *, times: int) -> list[str]:
        read = credentials._content
        replaced: list[str] = []

        def read_then_replace(path: Path) -> object:
            content = read(path)
            if path.name == name and len(replaced) < times:
                replaced.append(name)
                certificates.renew(folder, [Role.WORKER])
            return content

        monkeypatch.setattr(credentials, "_content", read_then_replace)
        return replaced

    return arm


def fault_of(folder: Path, now: datetime | None = None, kind: type[ParashardError] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        load(folder, now)
    return str(caught.value).replace(str(folder), "tls")


def test_a_valid_folder_names_its_identities_and_no_log_has_its_key(folder):
    material = load(folder)
    assert [str(identity) for identity in material.identities] == ["worker/worker-0"]
    assert material.expires > datetime.now(UTC)
    assert "PRIVATE" not in repr(material)


class TestFaults:
    """Are found at the start, and named."""

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
    def test_a_file_that_is_missing(self, folder, name):
        (folder / name).unlink()
        expected = f"tls/{name}: No such file or directory; a TLS folder has ca.pem, cert.pem and key.pem"
        assert fault_of(folder) == expected
        with pytest.raises(ConfigurationError, match="No such file"):
            Credentials(folder)

    def test_a_disk_that_does_not_give_a_file_may_give_it_later(self, folder, monkeypatch):
        def broken(path: Path, *_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, "Input/output error", str(path))

        monkeypatch.setattr(Path, "open", broken)
        assert fault_of(folder, kind=Unavailable).startswith("tls/ca.pem: Input/output error")

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o601])
    def test_a_key_that_others_may_use(self, folder, mode):
        (folder / "key.pem").chmod(mode)
        allowed = "no access for others, no writing for its group, such as 0600"
        assert fault_of(folder) == f"tls/key.pem: its mode is {mode:04o}; allowed: {allowed}"

    @pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
    def test_authorities_that_others_may_write(self, folder, mode):
        (folder / "ca.pem").chmod(mode)
        allowed = "no writing but its owner's, such as 0644"
        assert fault_of(folder) == f"tls/ca.pem: its mode is {mode:04o}; allowed: {allowed}"

    @pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
    def test_not_a_key_that_its_group_may_read(self, folder, mode):
        (folder / "key.pem").chmod(mode)
        assert load(folder)

    def test_a_certificate_that_expired(self, certificates):
        folder = certificates.folder(Role.WORKER, EXPIRED)
        assert fault_of(folder, kind=Unavailable).startswith("tls/cert.pem expired at ")
        assert fault_of(folder, kind=Unavailable).endswith(
            " UTC; renew it, such as by `parashard certs issue CA_DIR tls` with the --role and --host of before"
        )

    def test_an_authority_that_expired(self, certificates, folder):
        make_authority(folder.parent / "short", valid_days=1)
        certificates.renew(folder, [Role.WORKER], valid_days=9)
        with (folder / "ca.pem").open("ab") as trusted:
            trusted.write((folder.parent / "short" / "ca.pem").read_bytes())
        assert fault_of(folder, datetime.now(UTC) + timedelta(days=2), Unavailable).startswith("tls/ca.pem expired at ")

    def test_a_certificate_that_is_not_valid_yet(self, folder):
        fault = fault_of(folder, datetime.now(UTC) - timedelta(days=1), Unavailable)
        assert fault.startswith("tls/cert.pem is not valid before ")
        assert fault.endswith("is the clock right?")

    def test_a_key_of_another(self, certificates, folder):
        shutil.copy(certificates.folder(Role.SHARD) / "key.pem", folder / "key.pem")
        assert "cert.pem and key.pem do not belong together" in fault_of(folder)

    def test_a_certificate_without_a_role(self, certificates, folder):
        for name in ("cert.pem", "key.pem"):  # the authority's own: valid, and without an identity
            shutil.copy(certificates.authority / name.replace("cert", "ca").replace("key", "ca-key"), folder / name)
        assert fault_of(folder) == "tls/cert.pem: it names no role; needed: an alternative name such as " + (
            "parashard://worker/NAME"
        )

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem"])
    def test_a_file_that_is_no_certificate(self, folder, name):
        (folder / name).write_text("hello")
        needed = "PEM, -----BEGIN CERTIFICATE-----"
        assert fault_of(folder) == f"tls/{name} has no certificate that can be read, or a damaged one; needed: {needed}"

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
    def test_a_file_that_vanishes_once_it_was_read(self, folder, name, monkeypatch):
        read = credentials._content

        def read_last(path: Path) -> object:
            content = read(path)
            if path.name == "key.pem":
                (folder / name).unlink()
            return content

        monkeypatch.setattr(credentials, "_content", read_last)
        assert fault_of(folder) == "tls: No such file or directory"

    def test_the_role_of_another_process(self, folder):
        Credentials(folder).require(Role.WORKER)
        with pytest.raises(ConfigurationError, match="this process is a shard, and the certificate's roles are worker"):
            Credentials(folder).require(Role.SHARD)


class TestAStartWhileFilesAreReplaced:
    """A process takes up what belongs together, and a fault only if it stays."""

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
    def test_after_one_of_them_was_read(self, folder, replaced_when_read, name):
        replaced = replaced_when_read(name, times=1)
        started = Credentials(folder, pause=lambda _: None).current()
        assert replaced == [name]
        assert (started.chain, started.key) == tuple((folder / name).read_bytes() for name in ("cert.pem", "key.pem"))

    @pytest.mark.parametrize("late", ["cert.pem", "key.pem"])
    def test_between_two_of_them(self, certificates, folder, late):
        fresh = folder.parent / "fresh"
        certificates.renew(fresh, [Role.WORKER])
        for name in {"cert.pem", "key.pem"} - {late}:
            shutil.copy(fresh / name, folder / name)
        started = Credentials(folder, pause=lambda _: shutil.copy(fresh / late, folder / late)).current()
        assert started.chain == (fresh / "cert.pem").read_bytes()

    def test_a_fault_that_stays_is_reported_after_one_pause(self, certificates, folder):
        shutil.copy(certificates.folder(Role.SHARD) / "key.pem", folder / "key.pem")
        pauses: list[float] = []
        with pytest.raises(ConfigurationError, match="key"):
            Credentials(folder, pause=pauses.append)
        assert pauses == [SETTLE_S]

    def test_files_that_change_at_each_look_may_settle_later(self, folder, replaced_when_read):
        replaced_when_read("key.pem", times=20)
        pauses: list[float] = []
        with pytest.raises(Unavailable, match="its files have changed at each of 20 looks"):
            Credentials(folder, pause=pauses.append)
        assert pauses == [SETTLE_S] * 20

    def test_they_are_not_waited_for_for_ever(self, folder):
        modes = itertools.cycle([0o644, 0o604])
        (folder / "key.pem").chmod(0o604)
        with pytest.raises(ConfigurationError, match="its mode is"):
            Credentials(folder, pause=lambda _: (folder / "key.pem").chmod(next(modes)))


class TestRenewal:
    """New files are used once they are whole, and nothing else is."""

    @pytest.fixture
    def clock(self) -> list[float]:
        return [NOW_S]

    @pytest.fixture
    def credentials(self, folder, clock) -> Credentials:
        return Credentials(folder, clock=lambda: clock[0])

    def test_is_seen_at_the_next_look(self, certificates, folder, credentials, clock):
        before = credentials.current()
        certificates.renew(folder, [Role.WORKER])
        assert credentials.current() is before
        clock[0] += LOOK_S
        after = credentials.current()
        assert after.chain != before.chain
        assert (credentials.server_context(), credentials.client_context()) == (after.server, after.client)

    def test_without_new_files_nothing_is_read(self, credentials, clock):
        before = credentials.current()
        clock[0] += LOOK_S
        assert credentials.current() is before

    def test_of_a_mode_is_a_change_too(self, folder, credentials, clock):
        before = credentials.current()
        (folder / "key.pem").chmod(0o644)
        clock[0] += LOOK_S
        with capture_logs() as logs:
            assert credentials.current() is before
        said = [entry["why"] for entry in logs if entry["event"] == "credentials-not-renewed"]
        assert ["its mode is 0644" in why for why in said] == [True]

    def test_half_of_it_is_not_used_and_the_other_half_completes_it(self, certificates, folder, credentials, clock):
        before, fresh = credentials.current(), folder.parent / "fresh"
        certificates.renew(fresh, [Role.WORKER])
        shutil.copy(fresh / "cert.pem", folder / "cert.pem")
        clock[0] += LOOK_S
        assert credentials.current() is before
        shutil.copy(fresh / "key.pem", folder / "key.pem")
        clock[0] += LOOK_S
        assert credentials.current().chain == (fresh / "cert.pem").read_bytes()

    def test_that_does_not_come_about_is_reported_when_the_cause_changes_and_once_a_day(
        self, folder, credentials, clock
    ):
        def told(mode: int, looks: int = 3) -> int:
            (folder / "key.pem").chmod(mode)
            with capture_logs() as logs:
                for _ in range(looks):
                    clock[0] += LOOK_S
                    credentials.current()
            return len([entry for entry in logs if entry["event"] == "credentials-not-renewed"])

        assert (told(0o644), told(0o644)) == (1, 0)
        assert told(0o666) == 1
        clock[0] += WARN_EVERY_S
        assert told(0o666) == 1
        assert (told(0o600), told(0o666)) == (0, 1), "in between it was right"

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
    def test_while_it_is_read_is_no_mixture_of_both(self, certificates, folder, clock, replaced_when_read, name):
        watched = Credentials(folder, clock=lambda: clock[0])
        before = watched.current()
        certificates.renew(folder, [Role.WORKER])
        replaced = replaced_when_read(name, times=1)
        clock[0] += LOOK_S
        assert watched.current() is before
        assert replaced == [name]
        clock[0] += LOOK_S
        assert (watched.current().chain, watched.current().key) == tuple(
            (folder / name).read_bytes() for name in ("cert.pem", "key.pem")
        )

    def test_a_folder_that_is_gone_changes_nothing(self, folder, credentials, clock):
        before = credentials.current()
        shutil.rmtree(folder)
        clock[0] += LOOK_S
        assert credentials.current() is before

    def test_of_a_volume_of_kubernetes_is_one_renamed_link(self, certificates, tmp_path, clock):
        # The kubelet's atomic writer: each file is a link through ..data, and ..data is replaced.
        volume = tmp_path / "volume"
        for number in (1, 2):
            certificates.renew(volume / f"..{number}", [Role.WORKER])
            (volume / f"..{number}" / "key.pem").chmod(0o440)
            (volume / "..data_tmp").symlink_to(f"..{number}")
            if number == 1:
                (volume / "..data_tmp").rename(volume / "..data")
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (volume / name).symlink_to(f"..data/{name}")
        credentials = Credentials(volume, clock=lambda: clock[0])
        first = credentials.current()
        (volume / "..data_tmp").rename(volume / "..data")
        shutil.rmtree(volume / "..1")
        clock[0] += LOOK_S
        assert credentials.current().chain == (volume / "..2" / "cert.pem").read_bytes() != first.chain


class TestExpiry:
    """Is that of whatever ends first, and is told while there is time."""

    WORKER = (Identity(Role.WORKER, "worker-0"),)

    @pytest.mark.parametrize(("own", "authority"), [(2, 9), (9, 2)])
    def test_is_that_of_the_certificate_or_of_the_authority(self, tmp_path, own, authority):
        make_authority(tmp_path / "ca", valid_days=authority)
        issue(tmp_path / "ca", tmp_path / "tls", self.WORKER, valid_days=own)
        assert timedelta(days=1.9) < load(tmp_path / "tls").expires - datetime.now(UTC) < timedelta(days=2)

    def test_is_that_of_a_certificate_between_them(self, certificates, folder):
        make_authority(folder.parent / "between", valid_days=1)
        certificates.renew(folder, [Role.WORKER], valid_days=9)
        with (folder / "cert.pem").open("ab") as chain:
            chain.write((folder.parent / "between" / "ca.pem").read_bytes())
        assert load(folder).expires - datetime.now(UTC) < timedelta(days=1)

    @pytest.mark.parametrize(("days", "lines"), [(2, 1), (4, 0)])
    def test_is_reported_at_the_start_if_it_is_near(self, certificates, folder, days, lines):
        certificates.renew(folder, [Role.WORKER], valid_days=days)
        with capture_logs() as logs:
            Credentials(folder)
        assert [(line["event"], line["level"]) for line in logs] == [("credentials-expire-soon", "warning")] * lines

    def test_is_reported_once_a_day_until_there_is_a_new_one(self, certificates, folder):
        now_s = [NOW_S]
        certificates.renew(folder, [Role.WORKER], valid_days=2)
        with capture_logs() as logs:
            credentials = Credentials(folder, clock=lambda: now_s[0])
            for _ in range(50):  # two days, in hours
                now_s[0] += WARN_EVERY_S / 24
                credentials.current()
            certificates.renew(folder, [Role.WORKER], valid_days=30)
            now_s[0] += WARN_EVERY_S
            credentials.current()
        assert [line["event"] for line in logs] == ["credentials-expire-soon"] * 3 + ["credentials-renewed"]

    def test_is_not_reported_on_the_standard_output_of_a_command(self, certificates, folder, capsys):
        certificates.renew(folder, [Role.WORKER], valid_days=2)
        Credentials(folder)
        assert capsys.readouterr().out == ""

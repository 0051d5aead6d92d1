"""A folder of credentials: every fault of it in words, and new files without a restart."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import EXPIRED, Certificates

from parashard.errors import ConfigurationError
from parashard.security.credentials import LOOK_S, Credentials, load
from parashard.security.identity import Role

NOW_S = 100.0


@pytest.fixture
def folder(certificates: Certificates, tmp_path: Path) -> Path:
    """Return a folder of this test's own."""
    return Path(shutil.copytree(certificates.folder(Role.WORKER), tmp_path / "tls"))


def fault_of(folder: Path, now: datetime | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(folder, now)
    return str(caught.value).replace(str(folder), "tls")


def test_a_right_folder_says_who_it_is_for_and_tells_no_log_its_key(folder):
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

    @pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o601])
    def test_a_key_that_others_may_use(self, folder, mode):
        (folder / "key.pem").chmod(mode)
        assert fault_of(folder) == f"tls/key.pem: its mode is {mode:04o}; allowed: no access for others, such as 0600"

    @pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
    def test_not_a_key_that_its_group_may_read(self, folder, mode):
        (folder / "key.pem").chmod(mode)
        assert load(folder)

    def test_a_certificate_that_expired(self, certificates):
        folder = certificates.folder(Role.WORKER, EXPIRED)
        assert fault_of(folder).startswith("tls/cert.pem expired at ")
        assert fault_of(folder).endswith(" UTC; issue a new one")

    def test_an_authority_that_expired(self, certificates, folder):
        certificates.renew(folder, [Role.WORKER], valid_days=1000)
        assert fault_of(folder, datetime.now(UTC) + timedelta(days=500)).startswith("tls/ca.pem expired at ")

    def test_a_certificate_that_is_not_valid_yet(self, folder):
        fault = fault_of(folder, datetime.now(UTC) - timedelta(days=1))
        assert fault.startswith("tls/cert.pem is not valid before ")
        assert fault.endswith("is the clock right?")

    def test_a_key_of_another(self, certificates, folder):
        shutil.copy(certificates.folder(Role.SHARD) / "key.pem", folder / "key.pem")
        assert "cert.pem and key.pem do not belong together" in fault_of(folder)

    def test_a_certificate_without_a_role(self, certificates, folder):
        for name in ("cert.pem", "key.pem"):  # the authority's own: valid, and nobody's
            shutil.copy(certificates.authority / name.replace("cert", "ca").replace("key", "ca-key"), folder / name)
        assert fault_of(folder) == "tls/cert.pem: it names no role; needed: an alternative name such as " + (
            "parashard://worker/NAME"
        )

    @pytest.mark.parametrize("name", ["ca.pem", "cert.pem"])
    def test_a_file_that_is_no_certificate(self, folder, name):
        (folder / name).write_text("hello")
        assert fault_of(folder).startswith(f"tls/{name} has no certificate that can be read")

    def test_the_role_of_another_process(self, folder):
        Credentials(folder).require(Role.WORKER)
        with pytest.raises(ConfigurationError, match="this process is a shard, and the certificate's roles are worker"):
            Credentials(folder).require(Role.SHARD)


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

    def test_half_of_it_is_not_used_and_the_other_half_completes_it(self, certificates, folder, credentials, clock):
        before, fresh = credentials.current(), folder.parent / "fresh"
        certificates.renew(fresh, [Role.WORKER])
        shutil.copy(fresh / "cert.pem", folder / "cert.pem")
        clock[0] += LOOK_S
        assert credentials.current() is before
        shutil.copy(fresh / "key.pem", folder / "key.pem")
        clock[0] += LOOK_S
        assert credentials.current().chain == (fresh / "cert.pem").read_bytes()

    def test_a_folder_that_is_gone_changes_nothing(self, folder, credentials, clock):
        before = credentials.current()
        shutil.rmtree(folder)
        clock[0] += LOOK_S
        assert credentials.current() is before

"""Where a service may listen, and with which credentials."""

import pytest

from parashard.errors import ConfigurationError
from parashard.process.addresses import join_address
from parashard.process.arguments import advertised_address
from parashard.process.starts import Start
from parashard.security.given_credentials import credentials_of
from parashard.security.identity import Role


class TestWhereItListens:
    """Off loopback only with credentials, or with an explicit flag."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_on_loopback_without_more(self, host):
        assert credentials_of(Start.read(["--host", host]), Role.SHARD) is None

    @pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "fe80::1"])
    def test_elsewhere_not_without_credentials(self, host):
        with pytest.raises(ConfigurationError, match=f"host '{host}' is off loopback, and there are no credentials; "):
            credentials_of(Start.read(["--host", host]), Role.SHARD)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_on_all_addresses_only_with_the_host_that_others_are_told(self, host):
        given = ["--host", host, "--insecure"]
        for more in ([], ["--advertise", "node-1:7000"]):
            with pytest.raises(ConfigurationError, match="give --advertise HOST, too"):
                credentials_of(Start.read([*given, *more]), Role.SHARD)
        found = Start.read([*given, "--advertise", "node-1"])
        assert credentials_of(found, Role.SHARD) is None
        assert advertised_address(found, join_address(host, 7000)) == "node-1:7000"

    def test_elsewhere_with_insecure(self):
        assert credentials_of(Start.read(["--host", "10.0.0.1", "--insecure"]), Role.SHARD) is None

    def test_elsewhere_with_credentials_of_the_right_role(self, certificates):
        folder = str(certificates.folder(Role.SHARD))
        arguments = Start.read(["--host", "10.0.0.1", "--tls-dir", folder])
        assert str(credentials_of(arguments, Role.SHARD).folder) == folder
        with pytest.raises(ConfigurationError, match="this process is a coordinator"):
            credentials_of(arguments, Role.COORDINATOR)

    def test_the_environment_names_the_folder_unless_the_command_line_does(self, monkeypatch, certificates):
        monkeypatch.setenv("PARASHARD_TLS_DIR", "/nowhere")
        with pytest.raises(ConfigurationError, match=r"/nowhere/ca\.pem: No such file"):
            credentials_of(Start.read([]), Role.SHARD)
        given = Start.read(["--tls-dir", str(certificates.folder(Role.SHARD))])
        assert credentials_of(given, Role.SHARD)
        monkeypatch.setenv("PARASHARD_TLS_DIR", "")
        assert credentials_of(Start.read([]), Role.SHARD) is None

"""Certificates of rendered jobs: one choice decides, and a script makes the same Secrets as cert-manager would."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from grpc_health.v1 import health_pb2

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import LoadedJob, load_job
from parashard.protocol import rpc
from parashard.render.kubernetes import (
    NAMES_BYTES_MAX,
    Certificates,
    KubernetesOptions,
    certificates_of,
    cluster_overrides,
    render_kubernetes,
    security_values,
    shard_hosts,
)
from parashard.security.certs import issue
from parashard.security.credentials import Credentials, load
from parashard.security.identity import Identity, Role
from support.waiting import DEADLINE_S

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits.toml"
ROLES = ("coordinator", "shard", "worker", "operator")
SERVING = health_pb2.HealthCheckResponse.SERVING
KUBECTL = """#!/bin/sh
# Stands for kubectl: keeps the files that a Secret is made of, and says that it was applied.
set -eu
case $1 in
apply) cat >>"$APPLIED" ;;
create)
  test "$2 $3" = "secret generic"
  echo "$4"
  mkdir -p "$SECRETS/$4"
  for argument in "$@"; do
    case $argument in --from-file=*) pair=${argument#--from-file=}; cp "${pair#*=}" "$SECRETS/$4/${pair%%=*}" ;; esac
  done ;;
esac
"""


def loaded(*sets: str) -> LoadedJob:
    flags = [parse_set(text) for text in sets]
    return load_job(EXAMPLE, [*flags, *cluster_overrides(load_job(EXAMPLE, flags, {}))], {})


def rendered(*sets: str, certificates: Certificates | None = None) -> dict[str, str]:
    return render_kubernetes(loaded(*sets), KubernetesOptions(certificates=certificates))


class TestTheChoice:
    """TLS unless the job says otherwise, by cert-manager unless the user does."""

    def test_is_cert_manager_where_nothing_is_said(self):
        assert certificates_of(loaded(), None) is Certificates.CERT_MANAGER
        assert certificates_of(loaded(), Certificates.SECRETS) is Certificates.SECRETS

    def test_is_none_for_an_insecure_job(self):
        assert certificates_of(loaded("cluster.insecure=true"), None) is None

    @pytest.mark.parametrize("asked", list(Certificates))
    def test_is_not_guessed_where_both_are_said(self, asked):
        expected = f"flag --set: cluster.insecure: found true, with --certificates {asked}; allowed: one of the two"
        with pytest.raises(ConfigurationError, match=expected):
            certificates_of(loaded("cluster.insecure=true"), asked)

    def test_by_cert_manager_writes_what_it_reads(self):
        files = rendered()
        assert "  - certificates.yaml\n" in files["base/kustomization.yaml"]
        assert "kind: Certificate" in files["overlays/jobset/kustomization.yaml"]
        assert "secrets.sh" not in files

    def test_by_secrets_names_no_resource_that_a_cluster_lacks(self):
        files = rendered(certificates=Certificates.SECRETS)
        assert "cert-manager.io" not in "".join(files.values())
        assert "kind: Certificate" not in "".join(files.values())
        assert "secrets.sh" in files
        assert "secretName: digits-shard-tls" in files["base/shards.yaml"]
        assert files["base/shards.yaml"] == rendered()["base/shards.yaml"]

    def test_without_tls_there_is_nothing_of_it(self):
        files = rendered("cluster.insecure=true")
        texts = "".join(files.values())
        assert "tls" not in texts.lower()
        assert "certificate" not in texts.lower()
        assert "--advertise" not in texts  # addresses: names are not checked
        for path in ("coordinator", "shards", "workers"):
            assert files[f"base/{path}.yaml"].count("- --insecure\n") == 1


class TestNames:
    """Each shard's name is in one certificate, which gRPC bounds."""

    def test_are_a_numbered_pods_in_the_headless_service(self):
        assert shard_hosts("digits-shard", "digits", 2) == [
            "digits-shard-0.digits-shard",
            "digits-shard-1.digits-shard",
        ]

    def test_in_a_job_set_are_its_pods(self):
        overlay = yaml.safe_load(rendered("cluster.shards=3")["overlays/jobset/kustomization.yaml"])
        patch = next(one for one in overlay["patches"] if one["target"]["kind"] == "Certificate")
        (operation,) = yaml.safe_load(patch["patch"])
        assert operation["value"] == shard_hosts("digits-shard-0", "digits", 3)

    @pytest.mark.parametrize("certificates", list(Certificates))
    def test_too_many_are_refused_with_a_number_that_is_allowed(self, certificates):
        with pytest.raises(ConfigurationError, match=r"cluster.shards: found 1000, whose names take \d+ by") as caught:
            security_values("digits", 1000, certificates)
        about = int(str(caught.value).partition("so about ")[2].partition(" ")[0])
        security_values("digits", about, certificates)
        with pytest.raises(ConfigurationError):
            security_values("digits", about + about // 10, certificates)

    def test_without_tls_there_may_be_any_number_of_shards(self):
        security_values("digits", 1000, None)

    def test_at_the_bound_the_certificate_is_one_that_grpc_takes_from_a_client(self, certificates, tmp_path):
        shards = next(n for n in range(1000) if names_bytes(n + 1) > NAMES_BYTES_MAX)
        hosts = shard_hosts("digits-shard-0", "digits", shards)
        issue(certificates.authority, tmp_path, [Identity(Role.SHARD, "digits")], hosts=hosts, valid_days=1)
        server = rpc.Server("127.0.0.1:0", certificates.of(Role.COORDINATOR))
        server.start()
        try:
            channel = rpc.connect(server.address, Credentials(tmp_path))
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            with rpc.our_errors(server.address):
                assert check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status == SERVING
            channel.close()
        finally:
            server.stop(0)


def names_bytes(shards: int) -> int:
    return sum(len(host) + 2 for host in shard_hosts("digits-shard-0", "digits", shards))


@pytest.fixture(scope="class")
def secrets(tmp_path_factory) -> tuple[Path, Path]:
    """Run the script twice, as for a renewal; return the Secrets' folder and the log of what was applied."""
    folder = tmp_path_factory.mktemp("secrets")
    commands = folder / "bin"
    commands.mkdir()
    (commands / "kubectl").write_text(KUBECTL)
    (commands / "parashard").write_text(f'#!/bin/sh\nexec {sys.executable} -m parashard "$@"\n')
    for command in commands.iterdir():
        command.chmod(stat.S_IRWXU)
    (folder / "secrets.sh").write_text(rendered(certificates=Certificates.SECRETS)["secrets.sh"])
    kept = folder / "not" / "there yet"
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SECRETS": str(folder / "made"),
        "APPLIED": str(folder / "applied"),
        "PYTHONPATH": str(EXAMPLE.parent.parent),
    }
    for _ in range(2):
        ran = subprocess.run(
            ["sh", str(folder / "secrets.sh"), str(kept)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
    assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IRWXU
    return folder / "made", folder / "applied"


@pytest.mark.full("a shell script that makes a dozen keys by openssl; `parashard certs` has tests of its own")
class TestTheScript:
    """secrets.sh: what a cluster without cert-manager is given."""

    def test_makes_a_secret_for_each_role_and_renews_it(self, secrets):
        made, applied = secrets
        assert applied.read_text().split() == 2 * [f"digits-{role}-tls" for role in ROLES]
        for role in ROLES:
            assert sorted(path.name for path in (made / f"digits-{role}-tls").iterdir()) == [
                *("ca.crt", "tls.crt", "tls.key")
            ]

    @pytest.mark.parametrize("role", ROLES)
    def test_whose_files_are_a_process_credentials(self, secrets, tmp_path, role):
        made = secrets[0] / f"digits-{role}-tls"
        for key, name in (("ca.crt", "ca.pem"), ("tls.crt", "cert.pem"), ("tls.key", "key.pem")):
            (tmp_path / name).write_bytes((made / key).read_bytes())
        (tmp_path / "key.pem").chmod(0o440)
        assert [str(identity) for identity in load(tmp_path).identities] == [f"{role}/digits"]

    def test_and_have_the_names_that_cert_manager_would_give_them(self, secrets):
        manifests = list(yaml.safe_load_all(rendered()["base/certificates.yaml"]))
        for role, in_jobset in (("coordinator", []), ("shard", shard_hosts("digits-shard-0", "digits", 2))):
            asked = next(one["spec"] for one in manifests if one["metadata"]["name"] == f"digits-{role}")
            issued = dns_names(secrets[0] / f"digits-{role}-tls" / "tls.crt")
            assert issued == ["localhost", *asked["dnsNames"], *in_jobset]


def dns_names(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return found.get_values_for_type(x509.DNSName)

"""Certificates of a job's pods on Kubernetes: their issuer, their host names, their mounts.

Owns the decision between TLS and none, and the values of the templates that depend on it. Does not know the contents of
a certificate (`parashard.security`), nor other parts of pods.
"""

from __future__ import annotations

import enum

from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.render.common import template

NAMES_BYTES_MAX = 6 << 10
"""Of one certificate: gRPC's servers drop a client whose certificate has more than about 8 KiB (decision 0018)."""
NAME_OVERHEAD_BYTES = 2  # before each name: its type and its length

_WITH_TLS = (
    "coordinator_advertise",
    "shard_advertise",
    "operator_env",
    "operator_mount",
    "operator_volume",
    "tls_items",
    "tls_mount",
    "tls_volume",
)
"""Parts of pods with TLS only."""


class Certificates(enum.StrEnum):
    """The issuer of the Secrets with the pods' certificates."""

    CERT_MANAGER = "cert-manager"
    SECRETS = "secrets"  # the user, who runs secrets.sh with their own authority


def certificates_of(loaded: LoadedJob, wanted: Certificates | None) -> Certificates | None:
    """Return the issuer of a job's certificates; None: there are none, because of `cluster.insecure`."""
    if not loaded.job.cluster.insecure:
        return wanted or Certificates.CERT_MANAGER
    if wanted is not None:
        raise ConfigurationError(
            f"{loaded.origins['cluster.insecure']}: cluster.insecure: found true, with --certificates {wanted}; "
            "allowed: one of the two"
        )
    return None


def coordinator_hosts(name: str) -> list[str]:
    """Return the host names of a job's coordinator: its service's, and its pod's own in that service."""
    return [f"{name}-coordinator", f"{name}-coordinator-0", f"{name}-coordinator-0-0"]


def shard_hosts(pod: str, name: str, shards: int) -> list[str]:
    """Return the host names of the shards' pods, `pod` and a number, in their headless service."""
    return [f"{pod}-{index}.{name}-shard" for index in range(shards)]


def security_values(name: str, shards: int, certificates: Certificates | None) -> dict[str, str]:
    """Return the template values for certificates, by name; empty without TLS."""
    in_set, in_jobset = shard_hosts(f"{name}-shard", name, shards), shard_hosts(f"{name}-shard-0", name, shards)
    by_manager, by_script = (certificates is kind for kind in (Certificates.CERT_MANAGER, Certificates.SECRETS))
    if by_manager:
        _check_names(in_jobset, shards)  # the longer ones
    if by_script:
        _check_names([*in_set, *in_jobset], shards)
    values = {part: template(f"pods/{part}.yaml") if certificates else "" for part in _WITH_TLS}
    return values | {
        "security": template(f"pods/{'tls' if certificates else 'insecure'}.yaml"),
        "certificates_resource": "- certificates.yaml" if by_manager else "",
        "jobset_certificate": template("pods/jobset_certificate.yaml") if by_manager else "",
        "coordinator_dns_names": _items(coordinator_hosts(name)),
        "shard_dns_names": _items(in_set),
        "jobset_shard_dns_names": _items(in_jobset),
        "coordinator_host_flags": _flags(coordinator_hosts(name)),
        "shard_host_flags": _flags([*in_set, *in_jobset]),
    }


def _check_names(hosts: list[str], shards: int) -> None:
    used_bytes = sum(len(host) + NAME_OVERHEAD_BYTES for host in hosts)
    if used_bytes > NAMES_BYTES_MAX:
        raise ConfigurationError(
            f"cluster.shards: found {shards}, whose names take {used_bytes} bytes in the shards' certificate; allowed "
            f"on Kubernetes: {NAMES_BYTES_MAX}, so about {shards * NAMES_BYTES_MAX // used_bytes} shards with this "
            "job.name, or more with a shorter one"
        )


def _items(hosts: list[str]) -> str:
    return "\n".join(f"- {host}" for host in hosts)


def _flags(hosts: list[str]) -> str:
    return "\n".join(f"--host {host} \\" for host in hosts)

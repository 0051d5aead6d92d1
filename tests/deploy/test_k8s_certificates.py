"""The certificates of deploy/k8s: a pod has its role's, and what it connects to is called as its certificate says."""

import contextlib
import re
import ssl
import stat

import pytest

from parashard.security.credentials import OTHERS_MAY, load
from support.issued_secrets import Issuing, hours, mount, secret_volumes
from support.k8s_manifests import K8S, component, kustomized, of_kind, pod_templates, pods

ROLES = ("coordinator", "shard", "worker")
NAMED = re.compile(r"--(?:connect|advertise|advertise-data)=(.+):\d+")
SHARDS = 2


@pytest.fixture(scope="module")
def issuing(manifests):
    return Issuing(manifests)


def certificate(manifests, role):
    (found,) = (one["spec"] for one in of_kind(manifests, "Certificate") if one["metadata"]["name"] == f"digits-{role}")
    return found


def test_every_process_is_inside_tls_as_its_role(manifests, issuing, tmp_path):
    found = pods(manifests)
    assert set(found) == set(ROLES)
    for role, pod in found.items():
        (container,) = pod["containers"]
        assert "--tls-dir=/tls" in container["args"]
        assert "--insecure" not in container["args"]
        assert all(place["readOnly"] for place in container["volumeMounts"] if "tls" in place["name"])
        assert not any("subPath" in place for place in container["volumeMounts"])  # the kubelet would not renew it
        volume = secret_volumes(pod)["/tls"]
        folder = mount(volume, issuing.secret(volume["secretName"]), tmp_path / role)
        assert [str(identity) for identity in load(folder).identities] == [f"{role}/digits"]


def test_the_key_is_readable_by_the_pods_group_only(manifests):
    for template in pod_templates(manifests):
        security = template["spec"]["securityContext"]
        assert security["fsGroup"] == security["runAsGroup"]
        for volume in secret_volumes(template["spec"]).values():
            assert volume["defaultMode"] & stat.S_IRGRP
            assert not volume["defaultMode"] & OTHERS_MAY


def test_operators_commands_run_in_the_coordinators_pod(manifests, issuing, tmp_path):
    (container,) = pods(manifests)["coordinator"]["containers"]
    assert {"name": "PARASHARD_TLS_DIR", "value": "/tls-operator"} in container["env"]
    volume = secret_volumes(pods(manifests)["coordinator"])["/tls-operator"]
    folder = mount(volume, issuing.secret(volume["secretName"]), tmp_path / "operator")
    assert [str(identity) for identity in load(folder).identities] == ["operator/digits"]


def test_what_is_connected_to_is_named_in_its_certificate(manifests):
    names = {role: certificate(manifests, role)["dnsNames"] for role in ("coordinator", "shard")}
    advertised = []
    for role, pod in pods(manifests).items():
        for argument in pod["containers"][0]["args"]:
            if found := NAMED.fullmatch(argument):
                other = "coordinator" if argument.startswith("--connect") else role
                hosts = {found[1].replace("$(SHARD_INDEX)", str(index)) for index in range(SHARDS)}
                assert hosts <= set(names[other]), argument
                advertised.append((role, other))
    assert sorted(set(advertised)) == sorted(
        [("coordinator", "coordinator"), ("shard", "coordinator"), ("shard", "shard"), ("worker", "coordinator")]
    )


def test_a_shards_name_is_its_pods_in_the_headless_service(manifests):
    """Of a StatefulSet's pod it is NAME-ORDINAL.SERVICE, of an Indexed Job's JOB-INDEX.SUBDOMAIN."""
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(manifests, "Service")}
    assert services["digits-shard"]["clusterIP"] == "None"
    assert services["digits-shard"]["publishNotReadyAddresses"] is True
    jobsets = of_kind(manifests, "JobSet")
    if jobsets:
        pod = pods(manifests)["shard"]
        assert pod["subdomain"] == "digits-shard"
        assert jobsets[0]["spec"]["network"] == {"enableDNSHostnames": False}  # it would set another subdomain
        expected = "digits-shard-0-{}.digits-shard"
    else:
        (shards,) = (one for one in of_kind(manifests, "StatefulSet") if component(one) == "shard")
        assert (shards["metadata"]["name"], shards["spec"]["serviceName"]) == ("digits-shard", "digits-shard")
        expected = "digits-shard-{}.digits-shard"
    assert certificate(manifests, "shard")["dnsNames"] == [expected.format(index) for index in range(SHARDS)]


def test_only_what_is_connected_to_can_serve(manifests):
    for role in (*ROLES, "operator"):
        spec = certificate(manifests, role)
        assert spec["uris"] == [f"parashard://{role}/digits"]
        assert ("server auth" in spec["usages"]) == (role in ("coordinator", "shard")) == ("dnsNames" in spec)
        assert "client auth" in spec["usages"]
        assert not spec.get("isCA")


def test_the_authority_is_renewed_before_what_it_signed_can_outlive_it(manifests):
    authority = certificate(manifests, "ca")
    assert authority["isCA"] is True
    # With another key, certificates of before and after would not be trusted side by side.
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    for role in (*ROLES, "operator"):
        spec = certificate(manifests, role)
        assert spec["issuerRef"]["name"] == "digits-ca"
        assert spec["privateKey"]["rotationPolicy"] == "Always"
        assert hours(spec["renewBefore"]) < hours(spec["duration"]) < hours(authority["renewBefore"])


def test_certificates_of_before_and_after_a_renewal_of_the_authority_trust_each_other(tmp_path):
    rendered = kustomized(K8S / "base")
    issuing, found = Issuing(rendered), pods(rendered)

    def mounted(role, name):
        volume = secret_volumes(found[role])["/tls"]
        return load(mount(volume, issuing.secret(volume["secretName"]), tmp_path / name))

    worker, shard = mounted("worker", "worker"), mounted("shard", "shard")
    for name in ("digits-ca", "digits-worker-tls", "digits-shard-tls"):
        issuing.renew(name)
    renewed_worker, renewed_shard = mounted("worker", "renewed-worker"), mounted("shard", "renewed-shard")
    assert renewed_worker.ca != worker.ca
    for client, server in ((worker, renewed_shard), (renewed_worker, shard), (renewed_worker, renewed_shard)):
        assert shaken_hands(client.client, server.server)


def shaken_hands(client, server):
    """Let two contexts agree in memory; return whether both have seen the other's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="digits-shard-1.digits-shard"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in (*ends, *ends):  # client: hello; server: its flight; client: its; server: done
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return all(end.getpeercert() for end in ends)

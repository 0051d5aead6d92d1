"""Secrets as cert-manager would make them of the manifests, and as the kubelet would mount them; both by hand."""

from __future__ import annotations

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from support.k8s_manifests import Manifest, of_kind

EXTENDED_USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
USAGES = {"digital signature": "digital_signature", "cert sign": "key_cert_sign", "crl sign": "crl_sign"}
ALL_USAGES = (
    *USAGES.values(),
    *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
)
PRIVATE_KEY = {"algorithm": "ECDSA", "size": 256, "encoding": "PKCS8"}

Secret = dict[str, bytes]


class Issuing:
    """Issues what the Certificates among manifests ask for, by the Issuers that they name."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self._issuers = {issuer["metadata"]["name"]: issuer["spec"] for issuer in of_kind(manifests, "Issuer")}
        self._specs = {one["spec"]["secretName"]: one["spec"] for one in of_kind(manifests, "Certificate")}
        self._keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self._issued: dict[str, tuple[Secret, x509.Certificate, ec.EllipticCurvePrivateKey]] = {}

    def secret(self, name: str) -> Secret:
        """Return the content of a Secret that a Certificate names."""
        return self._made(name)[0]

    def renew(self, name: str) -> None:
        """Issue it anew, with another key unless its Certificate says that it keeps the one it has."""
        _, _, key = self._issued.pop(name)
        if self._specs[name]["privateKey"]["rotationPolicy"] == "Never":
            self._keys[name] = key

    def _made(self, name: str) -> tuple[Secret, x509.Certificate, ec.EllipticCurvePrivateKey]:
        if name not in self._issued:
            self._issued[name] = self._issue(self._specs[name])
        return self._issued[name]

    def _issue(self, spec: dict[str, Any]) -> tuple[Secret, x509.Certificate, ec.EllipticCurvePrivateKey]:
        assert PRIVATE_KEY.items() <= spec["privateKey"].items()
        key = self._keys.get(spec["secretName"]) or ec.generate_private_key(ec.SECP256R1())
        issuer = self._issuers[spec["issuerRef"]["name"]]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
        by: x509.Certificate | None = None
        signing = key
        if "ca" in issuer:
            _, by, signing = self._made(issuer["ca"]["secretName"])
        else:
            assert issuer == {"selfSigned": {}}
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(by.subject if by else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + hours(spec["duration"]))
            .add_extension(x509.BasicConstraints(ca=spec.get("isCA", False), path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        )
        asked = {USAGES[usage] for usage in spec["usages"] if usage in USAGES}
        builder = builder.add_extension(x509.KeyUsage(**{one: one in asked for one in ALL_USAGES}), critical=True)
        extended = [EXTENDED_USAGES[usage] for usage in spec["usages"] if usage not in USAGES]
        if extended:
            builder = builder.add_extension(x509.ExtendedKeyUsage(extended), critical=False)
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in spec.get("dnsNames", ())]
        names += [x509.UniformResourceIdentifier(uri) for uri in spec.get("uris", ())]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(signing, hashes.SHA256())
        content = {
            "ca.crt": (by or certificate).public_bytes(serialization.Encoding.PEM),
            "tls.crt": certificate.public_bytes(serialization.Encoding.PEM),
            "tls.key": key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        }
        return content, certificate, key


def hours(duration: str) -> timedelta:
    """Return what a duration such as 720h stands for."""
    assert duration.endswith("h")
    return timedelta(hours=int(duration[:-1]))


def mount(volume: dict[str, Any], content: Secret, folder: Path) -> Path:
    """Put a Secret into a folder as a volume of it does, in place of what was there; return the folder.

    As the kubelet's atomic writer: the files are links through `..data`, itself a link that is replaced by a rename.
    """
    folder.mkdir(exist_ok=True)
    former = [path for path in folder.glob("..2026_*") if path.is_dir()]
    written = Path(tempfile.mkdtemp(prefix="..2026_", dir=folder))
    for item in volume["items"]:
        path = written / item["path"]
        path.write_bytes(content[item["key"]])
        path.chmod(volume["defaultMode"])
        link = folder / item["path"]
        if not link.is_symlink():
            link.symlink_to(Path("..data") / item["path"])
    (folder / "..data_tmp").symlink_to(written.name)
    (folder / "..data_tmp").rename(folder / "..data")
    for path in former:
        shutil.rmtree(path)
    return folder


def secret_volumes(pod: Manifest) -> dict[str, dict[str, Any]]:
    """Return the Secrets that a pod's container sees, as volumes, by the folder that they are at."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    return {
        place["mountPath"]: volumes[place["name"]] for place in container["volumeMounts"] if place["name"] in volumes
    }

"""A certificate authority for development and tests, and the credential folders of processes."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from parashard.errors import ConfigurationError
from parashard.process.durable import sync_folder
from parashard.security.credentials import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    OTHERS_MAY,
    OTHERS_MAY_WRITE,
    check_key_mode,
    trusted_in,
)
from parashard.security.identity import NAME, SERVING, Identity, in_words

CA_KEY_FILE = "ca-key.pem"
CA_NAME = "parashard development CA"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
EARLIER = datetime.timedelta(minutes=5)  # clocks of machines differ

_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
HOST = re.compile(rf"(?=.{{1,253}}\Z)(\*\.{_LABEL}\.)?({_LABEL}\.)*(?![0-9]+\Z){_LABEL}")
"""A DNS name; OpenSSL accepts a wildcard only as the whole first label, with two labels below it."""

_PEM = serialization.Encoding.PEM


class Authority(NamedTuple):
    """An authority that can issue: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_authority(folder: Path, *, valid_days: int, now: datetime.datetime | None = None) -> None:
    """Make a certificate authority, its key first (mode 0600); a call after an interrupted one makes the rest."""
    if has_authority(folder):
        raise ConfigurationError(f"{folder} has an authority already; a new one would make its certificates worthless")
    _refuse_without_key(folder)
    now = now or datetime.datetime.now(datetime.UTC)
    begun = (folder / CA_KEY_FILE).exists()
    key = _authority_key(folder) if begun else ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CA_NAME)])
    certificate = (
        _begun(key.public_key(), name, name, now, now + datetime.timedelta(days=valid_days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    if not begun:
        _write(folder, {CA_KEY_FILE: _private(key)})
    _write(folder, {CA_FILE: certificate.public_bytes(_PEM)})


def has_authority(folder: Path) -> bool:
    """Return whether a folder has a complete authority."""
    return (folder / CA_KEY_FILE).exists() and (folder / CA_FILE).exists()


def issue(
    authority: Path,
    output: Path,
    identities: Sequence[Identity],
    *,
    hosts: Sequence[str] = (),
    valid_days: int,
    keep_ca: bool = False,
    now: datetime.datetime | None = None,
) -> datetime.datetime | None:
    """Issue a certificate, and write a process's credentials to a folder: `ca.pem`, `cert.pem`, `key.pem` (0600).

    Earlier files are replaced one by one, and keep owner, group and mode as far as that is permitted. A reader that
    finds a key and a certificate that do not match reads again (`parashard.security.credentials`). Only a shard, the
    coordinator or a server get a server's certificate too, for `hosts` besides loopback. `keep_ca` keeps other
    authorities until they expire. Returns when the authority expires, if that limits the certificate.
    """
    if output.resolve() == authority.resolve():
        raise ConfigurationError(
            f"{output} is the authority's own folder, whose key no process needs; allowed: another"
        )
    for identity in identities:
        if not NAME.fullmatch(identity.name):
            raise ConfigurationError(f"--name {identity.name!r}: allowed: up to 63 letters, digits, '.', '_' and '-'")
    now = now or datetime.datetime.now(datetime.UTC)
    ca = read_authority(authority, now)
    trusted = [ca.certificate, *(_kept(output / CA_FILE, ca.certificate, now) if keep_ca else ())]
    key = ec.generate_private_key(ec.SECP256R1())
    serves = any(identity.role in SERVING for identity in identities)
    if hosts and not serves:
        raise ConfigurationError(
            f"--host {hosts[0]}: {in_words(identities)} is not a server; allowed for: {', '.join(sorted(SERVING))}"
        )
    wanted, last = now + datetime.timedelta(days=valid_days), ca.certificate.not_valid_after_utc
    known = dict.fromkeys((*LOOPBACK, *hosts)) if serves else ()
    certificate = certificate_for(ca, key.public_key(), identities, list(known), now, min(wanted, last))
    write_credentials(output, b"".join(one.public_bytes(_PEM) for one in trusted), key, certificate.public_bytes(_PEM))
    return last if wanted > last else None


def certificate_for(
    authority: Authority,
    key: ec.EllipticCurvePublicKey,
    identities: Sequence[Identity],
    hosts: Sequence[str],
    now: datetime.datetime,
    ends: datetime.datetime,
) -> x509.Certificate:
    """Return a certificate of identities for a key; with a serving role it is a server's, too, for `hosts` only."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri) for identity in identities]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if any(identity.role in SERVING for identity in identities):
        names += [_host(host) for host in hosts]
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identities[0].name)])
    return (
        _begun(key, subject, authority.certificate.subject, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def write_credentials(folder: Path, ca: bytes, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> None:
    """Write or replace the three files of a process's folder, its key with mode 0600."""
    _write(folder, {CA_FILE: ca, KEY_FILE: _private(key), CERTIFICATE_FILE: certificate})


def read_authority(folder: Path, now: datetime.datetime) -> Authority:
    """Return the authority in a folder; ConfigurationError if it is incomplete, or has expired."""
    _refuse_without_key(folder)
    if not (folder / CA_FILE).exists():
        raise ConfigurationError(f"{folder / CA_FILE}: {os.strerror(errno.ENOENT)}; `parashard certs init` makes it")
    certificate = trusted_in(folder / CA_FILE)[1][0]
    key = _authority_key(folder)
    if key.public_key() != certificate.public_key():
        raise ConfigurationError(
            f"{folder}: {CA_FILE} and {CA_KEY_FILE} do not match: their certificates would be refused; put "
            "the right one back, or make an authority in another folder"
        )
    ends = certificate.not_valid_after_utc
    if now > ends:
        raise ConfigurationError(
            f"{folder / CA_FILE} expired at {ends:%Y-%m-%d %H:%M:%S} UTC: certificates from it would be refused; "
            "make an authority in another folder"
        )
    return Authority(certificate, key)


def _authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    path = folder / CA_KEY_FILE
    try:
        with path.open("rb") as file:
            check_key_mode(path, os.fstat(file.fileno()).st_mode)
            key = serialization.load_pem_private_key(file.read(), password=None)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError):  # TypeError: it has a password
        raise ConfigurationError(f"{path} cannot be read; needed: PEM, -----BEGIN PRIVATE KEY-----") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{path}: found another kind of key; allowed: an elliptic curve's")
    return key


def _refuse_without_key(folder: Path) -> None:
    if (folder / CA_FILE).exists() and not (folder / CA_KEY_FILE).exists():
        raise ConfigurationError(
            f"{folder} has {CA_FILE} and no {CA_KEY_FILE}; put its key back, or make an authority in another folder"
        )


def _kept(path: Path, issuer: x509.Certificate, now: datetime.datetime) -> list[x509.Certificate]:
    """Return the other authorities in a file that have not expired: an expired one would invalidate the folder."""
    found = trusted_in(path)[1] if path.exists() else []
    return [one for one in dict.fromkeys(found) if one != issuer and now <= one.not_valid_after_utc]


def _begun(
    key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    issuer: x509.Name,
    now: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(ends)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host):
        raise ConfigurationError(
            f"--host {host!r} is neither an address nor a name of DNS; allowed: labels of up to 63 letters (ASCII), "
            "digits, '-' and '_', with dots between them, and '*' as the first of at least three"
        )
    return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files one by one, once all of their contents are on the disk; a key is created with mode 0600."""
    # So a full disk leaves the earlier files, which belong together. A kill between two renames leaves some of each.
    temporaries: dict[Path, str] = {}
    path = folder / next(iter(contents))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = folder / name
            number, temporaries[path] = tempfile.mkstemp(prefix=f".{name}.", dir=folder)  # mode 0600
            with open(number, "wb") as file:
                file.write(content)
                file.flush()
                _take_over(number, path, private=name in (KEY_FILE, CA_KEY_FILE))
                os.fsync(number)
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
        sync_folder(folder)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):
                Path(temporary).unlink(missing_ok=True)


def _take_over(number: int, path: Path, *, private: bool) -> None:
    """Copy the owner, group and mode of the file that is replaced, as far as the system and the checks allow."""
    mode, forbidden = (0o600, OTHERS_MAY) if private else (0o644, OTHERS_MAY_WRITE)
    if path.exists():
        before = path.stat()
        if _chown(number, before.st_uid, before.st_gid) or _chown(number, -1, before.st_gid):
            mode = before.st_mode & 0o777 & ~forbidden
    os.fchmod(number, mode)


def _chown(number: int, user: int, group: int) -> bool:
    try:
        os.fchown(number, user, group)
    except OSError:
        return False
    return True

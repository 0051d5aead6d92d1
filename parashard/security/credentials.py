"""Credentials: one folder with `ca.pem`, `cert.pem` and `key.pem`, checked, and reloaded when it changes."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from parashard.errors import ConfigurationError, Unavailable, is_transient
from parashard.process.logs import log
from parashard.security.identity import SCHEME, Identity, Role, identities_in, in_words

if TYPE_CHECKING:
    from cryptography import x509

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "cert.pem"
KEY_FILE = "key.pem"
LOOK_S = 1.0  # between two checks of the folder for changes
SETTLE_S = 0.2  # pause before files that do not match are read again: they may be being replaced
LOOKS_AT_START = 20
OTHERS_MAY_WRITE = stat.S_IWOTH | stat.S_IWGRP  # forbidden modes of `ca.pem`: its certificates are trusted
OTHERS_MAY = stat.S_IRWXO | stat.S_IWGRP  # forbidden modes of a key; its group may read, as Kubernetes mounts secrets
EXPIRES_SOON = timedelta(days=3)  # as in deploy/prometheus/rules/alerts.yml
WARN_EVERY_S = 86_400.0


_Stamp = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class Material:
    """The consistent and valid content of a folder at one moment, as PEM and as TLS contexts."""

    ca: bytes = field(repr=False)
    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)  # never in a log
    identities: tuple[Identity, ...]  # in the certificate; not empty
    expires: datetime  # when the first certificate of the chain or of the authorities expires
    server: ssl.SSLContext  # for streams, as `client`: TLS 1.3, and the other side needs a certificate
    client: ssl.SSLContext


class Credentials:
    """The credentials of this process."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp, self._material = _settled(folder, pause)
        self._next_look_s = clock() + LOOK_S
        self._next_warning_s = clock()
        self._reported = "", 0.0  # why new files were not used, and when to log that again
        self._warn()

    @property
    def identities(self) -> tuple[Identity, ...]:
        """The identities of this process."""
        return self.current().identities

    def require(self, role: Role) -> None:
        """Raise `ConfigurationError` unless the certificate has a role."""
        identities = self.identities
        if not any(identity.role is role for identity in identities):
            raise ConfigurationError(
                f"{self.folder / CERTIFICATE_FILE}: this process is a {role}, and the certificate's roles are "
                f"{in_words(identities)}"
            )

    def check_host(self, host: str) -> None:
        """Raise `ConfigurationError` if a host that others connect to is an IP address that the certificate lacks."""
        from cryptography import x509

        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            certificate = _certificates(self.folder / CERTIFICATE_FILE, self.current().chain)[0]
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            known = names.get_values_for_type(x509.IPAddress)
            if address not in known:
                raise ConfigurationError(
                    f"{self.folder / CERTIFICATE_FILE}: others connect to {host}, and the certificate is for "
                    f"{', '.join(map(str, known)) or 'no address'}; `parashard certs issue` takes one --host for each"
                )

    def current(self) -> Material:
        """Return the material for a new connection; new files are used at most LOOK_S after they are complete."""
        with self._lock:
            if self._clock() >= self._next_look_s:
                self._next_look_s = self._clock() + LOOK_S
                self._look()
                self._warn()
            return self._material

    def server_context(self) -> ssl.SSLContext:
        """Return the context for an accepted connection."""
        return self.current().server

    def client_context(self) -> ssl.SSLContext:
        """Return the context for a connection to open."""
        return self.current().client

    def _look(self) -> None:
        try:
            stamp = _stamp(self.folder)
            if stamp == self._stamp:
                self._reported = "", 0.0
                return
            material = load(self.folder)
            if _stamp(self.folder) != stamp:
                return  # they changed meanwhile: check again next time
        except (ConfigurationError, Unavailable) as error:
            self._tell(str(error))
            return
        self._material, self._stamp, self._reported = material, stamp, ("", 0.0)
        log.info("credentials-renewed", roles=in_words(material.identities), expires=material.expires.isoformat())

    def _tell(self, why: str) -> None:
        """Log why new files are not used: when that changes, else once a day."""
        reported, again_s = self._reported
        if why != reported or self._clock() >= again_s:
            self._reported = why, self._clock() + WARN_EVERY_S
            log.warning("credentials-not-renewed", why=why, expires=self._material.expires.isoformat())

    def _warn(self) -> None:
        """Warn once a day before the expiry."""
        expires = self._material.expires
        if self._clock() < self._next_warning_s:
            return
        if expires - datetime.now(UTC) < EXPIRES_SOON:
            self._next_warning_s = self._clock() + WARN_EVERY_S
            log.warning("credentials-expire-soon", folder=str(self.folder), expires=expires.isoformat())


def load(folder: Path, now: datetime | None = None) -> Material:
    """Read and check a folder."""
    ca, authorities = trusted_in(folder / CA_FILE)
    (chain, _), (key, mode) = (_content(folder / name) for name in (CERTIFICATE_FILE, KEY_FILE))
    check_key_mode(folder / KEY_FILE, mode)
    certificates = _certificates(folder / CERTIFICATE_FILE, chain)
    certificate = certificates[0]  # the first is the holder's
    _check_time(folder / CERTIFICATE_FILE, certificate, now or datetime.now(UTC))
    for authority in authorities:
        _check_time(folder / CA_FILE, authority, now or datetime.now(UTC))
    identities = identities_in(_uris(certificate))
    if not identities:
        raise ConfigurationError(
            f"{folder / CERTIFICATE_FILE}: it names no role; needed: an alternative name such as {SCHEME}://worker/NAME"
        )
    server, client = _context(folder, ssl.PROTOCOL_TLS_SERVER), _context(folder, ssl.PROTOCOL_TLS_CLIENT)
    shown = [*certificates, *authorities]
    return Material(ca, chain, key, identities, min(one.not_valid_after_utc for one in shown), server, client)


def check_key_mode(path: Path, mode: int) -> None:
    """Raise `ConfigurationError` if a key is readable beyond owner and group, or writable beyond its owner."""
    if mode & OTHERS_MAY:
        raise ConfigurationError(
            f"{path}: its mode is {stat.S_IMODE(mode):04o}; allowed: no access for others, no writing for its group, "
            "such as 0600"
        )


def trusted_in(path: Path) -> tuple[bytes, list[x509.Certificate]]:
    """Return the trusted authorities in a file; `ConfigurationError` if others than its owner may write it."""
    content, mode = _content(path)
    if mode & OTHERS_MAY_WRITE:
        raise ConfigurationError(
            f"{path}: its mode is {stat.S_IMODE(mode):04o}; allowed: no writing but its owner's, such as 0644"
        )
    return content, _certificates(path, content)


def _kind_of(error: OSError) -> type[ConfigurationError | Unavailable]:
    return Unavailable if is_transient(error) else ConfigurationError


def _content(path: Path) -> tuple[bytes, int]:
    """Return a file's content and its mode."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise _kind_of(error)(
            f"{path}: {error.strerror}; a TLS folder has {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}"
        ) from None


def _certificates(path: Path, content: bytes) -> list[x509.Certificate]:
    from cryptography import x509  # here: slow to import, and needed only with TLS

    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigurationError(
            f"{path} has no certificate that can be read, or a damaged one; needed: PEM, -----BEGIN CERTIFICATE-----"
        ) from None


def _check_time(path: Path, certificate: x509.Certificate, now: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        raise Unavailable(f"{path} expired at {ends:%Y-%m-%d %H:%M:%S} UTC; {_renewal(path)}")
    if now < begins:
        raise Unavailable(f"{path} is not valid before {begins:%Y-%m-%d %H:%M:%S} UTC; is the clock right?")


def _renewal(path: Path) -> str:
    if path.name == CA_FILE:
        return "`parashard certs init` makes another authority; SECURITY.md, Renewal, says how to change over"
    return f"renew it, such as by `parashard certs issue CA_DIR {path.parent}` with the --role and --host of before"


def _uris(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.value.get_values_for_type(x509.UniformResourceIdentifier)


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)  # a client's context checks the server's name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session does not check the certificate, which may have expired
    try:
        context.load_verify_locations(folder / CA_FILE)
        # Without a prompt for the password of an encrypted key.
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{folder}: {CERTIFICATE_FILE} and {KEY_FILE} do not belong together, or one cannot be read: {error.reason}"
        ) from None
    except OSError as error:
        raise _kind_of(error)(f"{folder}: {error.strerror}") from None
    return context


def _settled(folder: Path, pause: Callable[[float], None]) -> tuple[_Stamp, Material]:
    """Return the material that a process starts with, and its stamp; raise an error only if it persists."""
    for looks_left in reversed(range(LOOKS_AT_START)):
        stamp: _Stamp | None = None
        try:
            stamp = _stamp(folder)
            material = load(folder)
            if _stamp(folder) == stamp:
                return stamp, material
            pause(SETTLE_S)
        except ConfigurationError:
            pause(SETTLE_S)
            if not looks_left or _stamp(folder) == stamp:
                raise
    raise Unavailable(f"{folder}: its files have changed at each of {LOOKS_AT_START} looks; try again")


def _stamp(folder: Path) -> _Stamp:
    """Return a value that changes when one of the files does."""
    try:
        found = [(folder / name).stat() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]
    except OSError as error:
        raise _kind_of(error)(
            f"{error.filename}: {error.strerror}; a TLS folder has {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}"
        ) from None
    return tuple((file.st_mtime_ns, file.st_ino, file.st_size, file.st_mode) for file in found)

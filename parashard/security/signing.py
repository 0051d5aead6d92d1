"""Certificates for keys that are made where they are used: a process's request, and the run's authority's answer.

A private key never leaves the machine that it was made on (`LocalKey`). Only texts travel: a request, which names its
identities, and the launcher's answer (`Signer`), which signs only for the identities that it expects from there.
`parashard.launch.hosts` and `parashard.launch.ray_cluster` carry the texts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidKey, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from parashard.errors import ConfigurationError, LimitExceeded, MalformedFrame, NotAllowed, shortened
from parashard.security.certs import Authority, certificate_for, read_authority, write_credentials
from parashard.security.credentials import CA_FILE, Credentials
from parashard.security.identity import Identity, identities_in, in_words

REQUEST_CHARACTERS_MAX = 4096
"""Longest request: one for two roles has about 500."""
LIFE = timedelta(days=8)
"""Life of a certificate, which is renewed at half of it: with less than three days left there would be an alert."""
RENEWAL_LEAST_S = 60.0
"""Shortest time from an answer to the next request, even if the authority expires soon; part of the answer."""
ASK_AGAIN_S = 10.0
"""Time after which an unanswered request is sent again."""
ANSWER_S = 60.0
"""How long the start of a process waits for its first certificate."""

_PEM = serialization.Encoding.PEM
_DAMAGED = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidKey, InvalidSignature),
    *(x509.DuplicateExtension, x509.InvalidVersion, x509.UnsupportedGeneralNameType),
)
"""Errors that parsing a peer's text as a request can raise."""


def request_for(key: ec.EllipticCurvePrivateKey, identities: Sequence[Identity]) -> str:
    """Return a request, as PEM, for a certificate of these identities."""
    names = [x509.UniformResourceIdentifier(identity.uri) for identity in identities]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.add_extension(x509.SubjectAlternativeName(names), critical=True).sign(key, hashes.SHA256())
    return request.public_bytes(_PEM).decode()


def sign(
    authority: Authority, request: str, identities: Sequence[Identity], hosts: Sequence[str], now: datetime
) -> x509.Certificate:
    """Return a certificate for a request that asks for exactly these identities; the launcher names the hosts."""
    if len(request) > REQUEST_CHARACTERS_MAX:
        raise LimitExceeded(
            f"a request for a certificate has {len(request)} characters; allowed: {REQUEST_CHARACTERS_MAX}"
        )
    try:
        read = x509.load_pem_x509_csr(request.encode())
        key, asked = read.public_key(), [extension.value for extension in read.extensions]
        signed = read.is_signature_valid
    except _DAMAGED as error:
        raise MalformedFrame(f"a request for a certificate cannot be read: {shortened(str(error))}") from None
    if not signed:
        raise MalformedFrame("a request for a certificate is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise MalformedFrame("a request for a certificate has a key of another kind; allowed: P-256")
    expected = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri) for identity in identities])
    if asked != [expected] or len(read.subject):
        raise NotAllowed(f"a certificate was asked for of {_in_words(asked)}; allowed: {in_words(identities)}, no more")
    ends = min(now + LIFE, authority.certificate.not_valid_after_utc)
    if now >= ends:
        raise ConfigurationError(f"the authority of the run expired at {ends:%Y-%m-%d %H:%M:%S} UTC")
    return certificate_for(authority, key, identities, hosts, now, ends)


def _in_words(extensions: Sequence[x509.ExtensionType]) -> str:
    """Return a request's identities as text, and the number of its other names and extensions."""
    names = [name for one in extensions if isinstance(one, x509.SubjectAlternativeName) for name in one]
    found = identities_in(name.value for name in names if isinstance(name, x509.UniformResourceIdentifier))
    others = len(names) - len(found) + sum(not isinstance(one, x509.SubjectAlternativeName) for one in extensions)
    return in_words(found) + (f" and {others} more" if others else "")


class Signer:
    """The authority of a run, in the launcher."""

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        """Read the authority, whose certificates all processes with these credentials must accept."""
        self._authority, self._credentials = read_authority(folder, datetime.now(UTC)), credentials
        if self._authority.certificate not in x509.load_pem_x509_certificates(credentials.current().ca):
            raise ConfigurationError(
                f"cluster.authority {folder}: {credentials.folder / CA_FILE} does not trust it, and processes "
                "would refuse each other; allowed: the authority that issued --tls-dir"
            )

    def answer(self, request: str, identities: Sequence[Identity], hosts: Sequence[str] = ()) -> dict[str, Any]:
        """Return the answer to a request, for `LocalKey.take`; raises as `sign`."""
        now = datetime.now(UTC)
        certificate = sign(self._authority, request, identities, hosts, now)
        life_s = (certificate.not_valid_after_utc - now).total_seconds()
        return {
            "ca": self._credentials.current().ca.decode(),
            "certificate": certificate.public_bytes(_PEM).decode(),
            "renew_in_s": max(RENEWAL_LEAST_S, life_s / 2),
        }


class LocalKey:
    """A private key of this machine, renewed at half of its certificate's life by its monotonic clock."""

    def __init__(
        self, folder: Path, identities: Sequence[Identity], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self._identities, self._clock = identities, clock
        self._lock = threading.Lock()
        self._key: ec.EllipticCurvePrivateKey | None = None  # of the request that is not answered
        self._request = ""
        self._due_s = -math.inf
        self._answered = threading.Event()

    def due(self) -> str:
        """Return the request to send now, or ""."""
        with self._lock:
            if self._clock() < self._due_s:
                return ""
            if self._key is None:
                self._key = ec.generate_private_key(ec.SECP256R1())
                self._request = request_for(self._key, self._identities)
            self._due_s = self._clock() + ASK_AGAIN_S
            return self._request

    def ask(self) -> None:
        """Let `due` return a request now, with a new key if no request is outstanding."""
        with self._lock:
            self._due_s = -math.inf

    def take(self, answer: Mapping[str, Any]) -> None:
        """Write the folder's files; ignore an answer to an earlier request."""
        certificate = str(answer["certificate"]).encode()
        with self._lock:
            own = None if self._key is None else self._key.public_key()
            if self._key is None or x509.load_pem_x509_certificate(certificate).public_key() != own:
                return
            write_credentials(self.folder, str(answer["ca"]).encode(), self._key, certificate)
            self._key, self._request = None, ""
            self._due_s = self._clock() + float(answer["renew_in_s"])
        self._answered.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first answer; return whether it has come."""
        return self._answered.wait(timeout_s)

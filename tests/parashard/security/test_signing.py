"""Keys that are made where they are used: what the run's authority signs, and what it refuses, however it is asked."""

from __future__ import annotations

import base64
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError, LimitExceeded, MalformedFrame, NotAllowed, ParashardError
from parashard.job.load import load_job
from parashard.launch.runs import Run, signer_of
from parashard.security import signing
from parashard.security.certs import Authority, make_authority, read_authority
from parashard.security.credentials import EXPIRES_SOON, Credentials, load
from parashard.security.identity import OF_A_JOB, Identity, Role
from parashard.security.signing import (
    ASK_AGAIN_S,
    LIFE,
    RENEWAL_LEAST_S,
    REQUEST_CHARACTERS_MAX,
    LocalKey,
    Signer,
    request_for,
    sign,
)
from support.certificates import Certificates
from support.small_job import SMALL_JOB

NOW = datetime(2026, 11, 28, tzinfo=UTC)
SHARD, WORKER = Identity(Role.SHARD, "shard-1"), Identity(Role.WORKER, "worker-7")
KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder = tmp_path_factory.mktemp("signing") / "ca"
    make_authority(folder, valid_days=365, now=NOW)
    return read_authority(folder, NOW)


def request_of(*names: str, key: object = KEY, subject: str = "", more: Sequence[x509.ExtensionType] = ()) -> str:
    """Return a request with these URIs, and whatever else a peer may put in."""
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, subject)] if subject else []
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(parts))
    if names:
        uris = [x509.UniformResourceIdentifier(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=True)
    for one in more:
        builder = builder.add_extension(one, critical=False)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM).decode()  # type: ignore[arg-type]


def hosts_in(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    kinds = (x509.DNSName, x509.IPAddress)
    return [str(name) for kind in kinds for name in names.get_values_for_type(kind)]


def test_a_shard_s_certificate_is_for_its_own_key_its_name_and_its_machine_alone(authority: Authority) -> None:
    certificate = sign(authority, request_for(KEY, [SHARD]), [SHARD], ["10.1.2.3"], NOW)
    assert certificate.public_key() == KEY.public_key()
    assert hosts_in(certificate) == ["10.1.2.3"], "loopback is every machine's"
    certificate.verify_directly_issued_by(authority.certificate)
    assert certificate.not_valid_after_utc == NOW + LIFE


def test_a_worker_s_certificate_is_for_no_machine(authority: Authority) -> None:
    assert hosts_in(sign(authority, request_for(KEY, [WORKER]), [WORKER], ["10.1.2.3"], NOW)) == []


def test_clocks_may_differ_by_five_minutes_and_a_certificate_ends_with_the_authority(authority: Authority) -> None:
    assert sign(authority, request_for(KEY, [SHARD]), [SHARD], [], NOW).not_valid_before_utc <= NOW - timedelta(
        minutes=5
    )
    last = authority.certificate.not_valid_after_utc
    late = sign(authority, request_for(KEY, [SHARD]), [SHARD], [], last - timedelta(hours=1))
    assert late.not_valid_after_utc == last
    with pytest.raises(ConfigurationError, match=r"the authority of the run expired at 2027-11-28 00:00:00 UTC"):
        sign(authority, request_for(KEY, [SHARD]), [SHARD], [], last)


def test_between_renewals_a_certificate_never_expires_soon() -> None:
    assert LIFE / 2 > EXPIRES_SOON


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (request_of("parashard://worker/worker-8"), "worker/worker-8"),
        (request_of("parashard://shard/worker-7"), "shard/worker-7"),
        (request_of("parashard://coordinator/worker-7"), "coordinator/worker-7"),
        (request_of("parashard://operator/worker-7", WORKER.uri), "operator/worker-7, worker/worker-7"),
        (request_of(WORKER.uri, WORKER.uri), "worker/worker-7, worker/worker-7"),
        (request_of("spiffe://else/where"), "none and 1 more"),
        (request_of(), "none"),
        (request_of(WORKER.uri, subject="coordinator"), "worker/worker-7"),
        (
            request_of(
                more=[x509.SubjectAlternativeName([x509.DNSName("train"), x509.UniformResourceIdentifier(WORKER.uri)])]
            ),
            "worker/worker-7 and 1 more",
        ),
        (
            request_of(WORKER.uri, more=[x509.BasicConstraints(ca=True, path_length=None)]),
            "worker/worker-7 and 1 more",
        ),
    ],
    ids=lambda value: value if "-----" not in value else "",
)
def test_another_name_or_role_or_anything_more_is_refused(authority: Authority, request_: str, found: str) -> None:
    with pytest.raises(NotAllowed, match=f"was asked for of {found}; allowed: worker/worker-7, no more"):
        sign(authority, request_, [WORKER], [], NOW)


def test_a_request_that_is_too_long_is_refused_before_it_is_read(authority: Authority) -> None:
    whole = request_for(KEY, [WORKER])
    padded = whole + "x" * (REQUEST_CHARACTERS_MAX + 1 - len(whole))
    with pytest.raises(LimitExceeded, match="has 4097 characters; allowed: 4096"):
        sign(authority, padded, [WORKER], [], NOW)
    sign(authority, padded[:-1], [WORKER], [], NOW)


def swapped(request: str, other: str) -> str:
    """Return a request with the signature of another."""
    first, second = (x509.load_pem_x509_csr(one.encode()) for one in (request, other))
    whole = first.public_bytes(serialization.Encoding.DER)
    forged = whole.replace(first.signature, second.signature)
    if len(first.signature) != len(second.signature):  # a DER signature has 70 to 72 bytes
        return swapped(request, request_for(KEY, [SHARD]))
    return (
        f"-----BEGIN CERTIFICATE REQUEST-----\n{base64.b64encode(forged).decode()}\n-----END CERTIFICATE REQUEST-----\n"
    )


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("", "cannot be read"),
        ("worker-7", "cannot be read"),
        ("\udcff", "cannot be read"),
        ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "cannot be read"),
        (swapped(request_for(KEY, [WORKER]), request_for(KEY, [SHARD])), "not signed by its own key"),
        (request_of(WORKER.uri, key=ec.generate_private_key(ec.SECP384R1())), "a key of another kind; allowed: P-256"),
        (request_of(WORKER.uri, key=ed25519.Ed25519PrivateKey.generate()), "a key of another kind; allowed: P-256"),
        (request_of(WORKER.uri, key=rsa.generate_private_key(65537, 2048)), "a key of another kind; allowed: P-256"),
    ],
    ids=["empty", "text", "no unicode", "no request", "forged", "P-384", "ed25519", "rsa"],
)
def test_what_is_no_request_of_ours_is_refused_in_a_sentence(authority: Authority, request_: str, why: str) -> None:
    with pytest.raises(MalformedFrame, match=f"a request for a certificate .*{why}"):
        sign(authority, request_, [WORKER], [], NOW)


@given(place=st.integers(28, 500), byte=st.integers(1, 255))
def test_a_request_with_any_byte_changed_is_refused_or_the_same(authority: Authority, place: int, byte: int) -> None:
    text = bytearray(request_for(KEY, [WORKER]).encode())
    text[place % len(text)] ^= byte
    try:
        certificate = sign(authority, text.decode("latin-1"), [WORKER], [], NOW)
    except ParashardError:
        return
    assert certificate.public_key() == KEY.public_key()


# --- the two sides together ---


@pytest.fixture
def credentials(certificates: Certificates) -> Credentials:
    return certificates.of(*OF_A_JOB)


@pytest.fixture
def signer(certificates: Certificates, credentials: Credentials) -> Signer:
    return Signer(certificates.authority, credentials)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_key_stays_where_it_is_made_and_only_its_owner_reads_it(signer: Signer, tmp_path: Path) -> None:
    key = LocalKey(tmp_path / "tls", [SHARD])
    request = key.due()
    assert not (tmp_path / "tls").exists(), "nothing is written before it is of use"
    answer = signer.answer(request, [SHARD], ["127.0.0.1"])
    assert "PRIVATE" not in request + str(answer)
    key.take(answer)
    assert key.wait(0.0)
    assert stat.S_IMODE((tmp_path / "tls" / "key.pem").stat().st_mode) == 0o600
    made = load(tmp_path / "tls")
    assert (made.identities, made.ca) == ((SHARD,), signer._credentials.current().ca)


def test_a_request_is_sent_again_until_it_is_answered_and_renewed_at_half_of_the_life(
    signer: Signer, tmp_path: Path
) -> None:
    clock = Clock()
    key = LocalKey(tmp_path / "tls", [WORKER], clock)
    first = key.due()
    assert (bool(first), key.due()) == (True, "")
    clock.now_s += ASK_AGAIN_S
    assert key.due() == first, "the same: its answer may be on the way"
    key.take(signer.answer(first, [WORKER]))
    before = (tmp_path / "tls" / "key.pem").read_bytes()
    clock.now_s += LIFE.total_seconds() / 2 - 60
    assert key.due() == ""
    clock.now_s += 61
    second = key.due()
    assert second not in ("", first)
    assert (tmp_path / "tls" / "key.pem").read_bytes() == before, "the old one until there is another"
    key.take(signer.answer(second, [WORKER]))
    assert (tmp_path / "tls" / "key.pem").read_bytes() != before
    assert load(tmp_path / "tls").identities == (WORKER,)


def test_an_answer_to_an_earlier_request_or_another_incarnation_s_changes_nothing(
    signer: Signer, tmp_path: Path
) -> None:
    clock = Clock()
    old, new = LocalKey(tmp_path / "old", [WORKER], clock), LocalKey(tmp_path / "new", [WORKER], clock)
    answer = signer.answer(old.due(), [WORKER])
    new.due()
    new.take(answer)
    assert (new.wait(0.0), (tmp_path / "new").exists()) == (False, False)
    old.take(answer)
    before = (tmp_path / "old" / "cert.pem").read_bytes()
    clock.now_s += LIFE.total_seconds()
    old.due()
    old.take(answer)
    assert (tmp_path / "old" / "cert.pem").read_bytes() == before


def test_near_the_authority_s_end_requests_do_not_come_faster_and_faster(
    signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    key = LocalKey(tmp_path / "tls", [WORKER], clock)
    monkeypatch.setattr(signing, "LIFE", timedelta(seconds=1))
    key.take(signer.answer(key.due(), [WORKER]))
    clock.now_s += RENEWAL_LEAST_S - 1
    assert key.due() == ""
    clock.now_s += 1
    assert key.due()


def test_a_folder_that_cannot_be_written_is_said_and_the_request_is_sent_again(signer: Signer, tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "file").touch()
    key = LocalKey(tmp_path / "file" / "tls", [WORKER], clock)
    request = key.due()
    with pytest.raises(ConfigurationError, match=r"ca\.pem cannot be written: "):
        key.take(signer.answer(request, [WORKER]))
    clock.now_s += ASK_AGAIN_S
    assert (key.due(), key.wait(0.0)) == (request, False)


def test_an_authority_that_the_run_does_not_trust_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    make_authority(tmp_path / "ca", valid_days=1)
    with pytest.raises(
        ConfigurationError, match=r"cluster\.authority .*ca: .*ca\.pem does not trust it, and processes"
    ):
        Signer(tmp_path / "ca", certificates.of(*OF_A_JOB))


def test_an_authority_without_credentials_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(f'{SMALL_JOB}\n[cluster]\nauthority = "ca"\n')
    run = Run(load_job(tmp_path / "small.toml", environ={}), tmp_path)
    with pytest.raises(ConfigurationError, match=rf"cluster\.authority {tmp_path}/ca: .* there is no --tls-dir"):
        signer_of(run)
    assert signer_of(run._replace(loaded=load_job(_without(tmp_path), environ={}))) is None


def _without(folder: Path) -> Path:
    (folder / "plain.toml").write_text(SMALL_JOB)
    return folder / "plain.toml"

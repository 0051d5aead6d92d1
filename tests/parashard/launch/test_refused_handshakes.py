"""Refused handshakes, out of what gRPC writes into a process's log."""

from __future__ import annotations

from pathlib import Path

from parashard.launch.run_watch import READ_BYTES, RefusedHandshakes

REFUSED = "I1124 02:19:18 25006 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: error:1:SSL "
NO_TLS = f"{REFUSED}routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification context\n"
NO_CERTIFICATE = f"{REFUSED}routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE\n"
FOREIGN = f"{REFUSED}routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n"
AND_SO = "; a worker joins with --tls-dir and one of this run's authority"


def test_each_reason_is_said_once_and_none_of_an_earlier_start(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    assert RefusedHandshakes(log).look() == "", "it is not there yet"
    log.write_text(FOREIGN)
    refused = RefusedHandshakes(log)
    assert refused.look() == ""
    with log.open("a") as file:
        file.write("level=info event=serving\n" + NO_TLS + NO_CERTIFICATE)
        file.flush()
        assert refused.look() == f"the coordinator refuses a process without a certificate{AND_SO}"
        file.write(NO_TLS + "x" * READ_BYTES + FOREIGN)
        file.flush()
        taken = "with a certificate that is not taken (CERTIFICATE_VERIFY_FAILED)"
        assert refused.look() == f"the coordinator refuses a process {taken}{AND_SO}"
        assert refused.look() == ""

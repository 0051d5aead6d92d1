"""Roles travel as URIs, and nothing that is nearly one of ours gives a right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.security.identity import NAME, Identity, Role, identities_in


@given(st.lists(st.builds(Identity, st.sampled_from(Role), st.from_regex(NAME, fullmatch=True))))
def test_what_is_written_is_read(identities):
    assert list(identities_in(identity.uri for identity in identities)) == identities


@pytest.mark.parametrize(
    "uri",
    [
        "parashard://admin/x",
        "parashard://worker",
        "parashard://worker/",
        "parashard://worker/a/b",
        "parashard://worker/a\n",
        " parashard://worker/a",
        "PARASHARD://worker/a",
        "parashard://Worker/a",
        "parashard://worker/a?operator",
        "https://parashard://worker/a",
        "spiffe://parashard/worker/a",
        "parashard://worker/" + "a" * 64,
    ],
)
def test_what_is_nearly_one_is_none(uri):
    assert identities_in([uri]) == ()

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.job.policy import Policy

policies = st.one_of(
    st.just(Policy("async")),
    st.just(Policy("auto")),
    st.builds(Policy, st.just("ssp"), st.integers(0, 10**9 - 1)),
    st.builds(Policy, st.just("sync"), st.integers(1, 10**9 - 1)),
)


@given(policies)
def test_text_round_trip(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", Policy("auto")),
        ("auto:4", Policy("auto", 4)),
        ("async", Policy("async", 0)),
        ("ssp:0", Policy("ssp", 0)),
        ("sync:1", Policy("sync", 1)),
    ],
)
def test_forms(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy
    assert str(policy) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bsp",
        "async:1",
        "ssp",
        "ssp:",
        "ssp:-1",
        "ssp:+1",
        "ssp:01",
        "ssp:1 ",
        "ssp:1000000000",
        "sync:0",
        "ssp:٣",
        "auto:0",
        "auto:4097",
    ],
)
def test_refused_text_is_named_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Policy.parse(text)
    assert str(error.value) == (
        f"policy {text!r}; allowed: auto, async, ssp:K with 0 <= K < 10^9, or sync:N with 1 <= N < 10^9"
    )

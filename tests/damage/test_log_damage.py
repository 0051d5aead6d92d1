"""Bits flipped at random in a push log: seen and named, or harmless; never a wrong gradient (P18)."""

from log_damage import flip_log_bits


def test_flipped_bits_are_seen_or_do_no_harm(tmp_path):
    outcomes, violations = flip_log_bits(tmp_path, flips=500, seed=1)
    assert violations == []
    assert outcomes.total() == 500
    assert min(outcomes["detected"], outcomes["harmless"]) > 50  # both really came

"""Torn and damaged checkpoints: each damage is detected or harmless, and the good checkpoint before it is used.

Ten thousand flips: `PYTHONPATH=.:tests python tests/damage/checkpoint_damage.py --flips 10000`.
"""

import pytest
from checkpoint_damage import FILES, PAGE_BYTES, Damage, flip_bits, lose_pages, truncate_files

from support.tiers import by_tier

FLIPS = by_tier(quick=40, full=100)


@pytest.mark.full("every place; test_lost_pages and test_flipped_bits draw some")
def test_truncation_at_each_page_boundary_and_at_each_of_the_last_64_bytes():
    lengths = [len(Damage().content(name)) for name in FILES]
    figures = truncate_files()
    assert figures["detected"] == sum(
        -(-length // PAGE_BYTES) + 64 - ((length - 1) % PAGE_BYTES < 64) for length in lengths
    )
    assert figures["harmless"] == 0


def test_flipped_bits():
    # SHA-256 covers every bit of every file, so that not even a harmless one is missed.
    assert flip_bits(FLIPS, seed=1) == {"detected": FLIPS}


def test_lost_pages():
    figures = lose_pages(FLIPS, seed=1)
    assert figures.total() == FLIPS
    assert figures["detected"] > 0.7 * FLIPS  # the others put a page of a file in place of itself

"""SplitMix64: the authors' words, whatever the shape, in the array that was given."""

import numpy as np

from parashard.plan.seeding import splitmix64


def test_it_is_the_authors() -> None:
    # First outputs of the authors' splitmix64.c from the states 0 and 1234567.
    from_0 = splitmix64(np.arange(1, 4, dtype=np.uint64), 0)
    assert from_0.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    from_1234567 = splitmix64(np.arange(1, 4, dtype=np.uint64), 1234567)
    assert from_1234567.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_result_lies_where_the_counters_lay() -> None:
    counters = np.arange(6, dtype=np.uint64).reshape(2, 3)
    result = splitmix64(counters, (1 << 64) - 1)
    assert result is counters
    assert np.array_equal(result.ravel(), splitmix64(np.arange(6, dtype=np.uint64), (1 << 64) - 1))

"""Buffers: pieces count as one run of bytes, whatever their number, sizes and types."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.protocol.messages import Buffers
from parashard.transports import memory

pieces_of_bytes = st.lists(st.binary(max_size=12), max_size=6)


def bounds_in(data: st.DataObject, size: int) -> tuple[int, int]:
    begin = data.draw(st.integers(0, size))
    return begin, data.draw(st.integers(begin, size))


@given(pieces_of_bytes, st.data())
def test_any_run_has_the_bytes_of_the_pieces_end_to_end(pieces, data):
    buffers, whole = Buffers(pieces), b"".join(pieces)
    begin, end = bounds_in(data, len(whole))
    assert buffers.nbytes == len(whole)
    assert b"".join(buffers.run(begin, end)) == whole[begin:end]
    assert all(view.nbytes for view in buffers.run(begin, end))  # an empty view would be a message's end to some


@given(pieces_of_bytes, st.data())
def test_filling_changes_those_bytes_and_no_others(pieces, data):
    writable = [bytearray(piece) for piece in pieces]
    whole = bytearray(b"".join(pieces))
    begin, end = bounds_in(data, len(whole))
    content = data.draw(st.binary(min_size=end - begin, max_size=end - begin))
    memory.scatter(memoryview(content), Buffers(writable), begin)
    whole[begin:end] = content
    assert b"".join(writable) == whole


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 11), (11, 11)])
def test_bytes_that_are_not_there_are_refused(begin, end):
    with pytest.raises(ValueError, match=rf"bytes \[{begin}, {end}\) are not within 10"):
        Buffers([bytes(4), bytes(6)]).run(begin, end)


def test_more_than_fits_is_filled_nowhere():
    pieces = [bytearray(4), bytearray(6)]
    with pytest.raises(ValueError, match="not within 10"):
        memory.scatter(memoryview(b"abcdef"), Buffers(pieces), 5)
    assert not any(b"".join(pieces))


def test_nothing_is_copied():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    alone = Buffers([array.data])
    for view in alone.run(4, 20):
        assert np.shares_memory(np.frombuffer(view, np.uint8), array)
    memory.scatter(memoryview(np.float32(9.0).tobytes()), alone, 0)
    assert array[0, 0] == 9.0


def test_pieces_of_any_shape_and_type_are_bytes():
    arrays = [np.ones((2, 3), np.float32), np.zeros((0, 4), np.float32), np.arange(3, dtype=np.int16)]
    buffers = Buffers([array.data for array in arrays])
    assert buffers.nbytes == 24 + 0 + 6
    assert b"".join(buffers.pieces) == b"".join(array.tobytes() for array in arrays)

"""What leaves a GPU encoded has the bytes of the host's encoders: the kernel compiled for this CPU, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.encodings import codec, compiled
from parashard.encodings.encoding import Encoding
from parashard.encodings.gpu import TransferLayout, leaves_shorter
from parashard.plan.flat import FlatLayout
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Variable
from support.encoding_cases import drawn
from support.in_process import plan_of, variables_of

LOWER = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF)
"""Lower halves of float32s: on both sides of what float16 and bfloat16 round at, and ties."""


def left_of(cupy: Any, variables: dict[str, Variable], run: np.ndarray) -> dict[str, np.ndarray]:
    """Return what leaves a GPU of a run of gradients."""
    leaving = TransferLayout(cupy, FlatLayout.of(variables), variables)
    words = cupy.empty(leaving.words, np.uint16)
    leaving.write(cupy.asarray(run), words, variables, None)
    return leaving.over(np.array(words.get()), None)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_every_upper_half_of_a_number_has_the_hosts_code(cupy_somewhere: Any, encoding: str) -> None:
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array(LOWER, np.uint32)).reshape(-1)
    values = bits.view(np.float32)  # NaN, infinities, denormals and zeros of both signs among them
    found = left_of(cupy_somewhere, {"w": Variable("w", values.shape, encoding=encoding)}, values)["w"]
    expected = np.empty(values.size, np.uint16)
    getattr(compiled, f"to_{encoding}")(codec.read_only(values), expected)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, expected)


def test_each_partition_has_the_bytes_of_the_hosts_encoder(cupy_somewhere: Any) -> None:
    variables = variables_of(
        Variable("a", (7, 3), encoding="float16"),
        Variable("b", (64,)),
        Variable("c", (65,), encoding="bfloat16"),
        Variable("d", (5, 100), encoding="int8"),
        Variable("f", (129, 2), encoding="bfloat16"),
        Variable("g", (9,), encoding="float16", frozen=True),
        Variable("h", (1,), encoding="topk:0.1"),
        Variable("i", (2, 3), state="sum"),
    )
    plan, layout = plan_of(variables, 3, fixed_shards(3)), FlatLayout.of(variables)
    run = drawn(1, layout.elements)
    found = left_of(cupy_somewhere, variables, run)
    assert found.keys() == variables.keys() - {"g"}
    for placed in (placed for of_shard in plan.layouts for placed in of_shard if placed.partition.variable != "g"):
        p = placed.partition
        gradient = run[layout.places[p.variable][0]].reshape(variables[p.variable].shape)[p.row_start : p.row_stop]
        rows = found[p.variable][p.row_start : p.row_stop]
        if variables[p.variable].encoding not in ("float16", "bfloat16"):
            np.testing.assert_array_equal(rows.view(np.uint32), gradient.view(np.uint32))
            continue
        piece = Encoding.parse(variables[p.variable].encoding).slice_of(p, variables[p.variable].row_elements)
        expected = np.empty(piece.size_bytes, np.uint8)
        codec.encode(piece, np.ascontiguousarray(gradient).reshape(-1), expected)
        np.testing.assert_array_equal(np.ascontiguousarray(rows).reshape(-1).view(np.uint8), expected)


def test_only_what_is_shorter_for_it_leaves_as_codes() -> None:
    assert leaves_shorter([Variable("a", (1,)), Variable("b", (1,), encoding="topk:0.1")])
    assert not leaves_shorter([Variable("a", (1,)), Variable("b", (1,), encoding="float16", frozen=True)])

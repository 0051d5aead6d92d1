"""int8 and top-k on a GPU: the bytes and residues of the host's encoder, whatever becomes of each shard's push.

The kernels are compiled for this CPU, and run on a GPU.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.encodings import gpu_blocks
from parashard.encodings.encoding import Encoding
from parashard.encodings.feedback import Encoded, EncodedParts, GradientEncoder
from parashard.encodings.gpu import TransferLayout
from parashard.encodings.gpu_blocks import EncodedPiece
from parashard.encodings.gpu_feedback import HeldResidues
from parashard.plan.flat import FlatLayout
from parashard.plan.partition import Partition, Placed, fixed_shards
from parashard.plan.variables import Variable
from support.compiled_cupy import CompiledCupy
from support.encoding_cases import drawn
from support.in_process import plan_of, variables_of

VARIABLES = variables_of(
    Variable("a", (70, 9), encoding="int8"),
    Variable("b", (5,)),
    Variable("c", (301,), encoding="int8"),
    Variable("d", (4, 3), encoding="int8"),
    Variable("e", (3,), encoding="int8"),  # a partition of one number is no shorter: it leaves in float32
    Variable("f", (50, 70), encoding="topk:0.01"),
    Variable("g", (300,), encoding="topk:0.4"),
    Variable("h", (3,), encoding="topk:0.4"),  # likewise
)
ENCODED = ("a", "c", "d", "f", "g")
PLAN, LAYOUT = plan_of(VARIABLES, 2, fixed_shards(2)), FlatLayout.of(VARIABLES)
SMALLEST, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


class Beside:
    """The same pushes by the host's encoder and by a GPU's."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.host = GradientEncoder(PLAN)
        self.gpu = TransferLayout(cupy, LAYOUT, VARIABLES, PLAN)

    def encode(self, run: np.ndarray, names: tuple[str, ...] = ENCODED) -> tuple[list[list[Encoded]], HeldResidues]:
        """Encode both ways, compare every payload, and return what is to be settled."""
        taken = self.gpu.new_residues()
        assert taken is not None
        words = self.cupy.empty(self.gpu.words, np.uint16)
        self.gpu.write(self.cupy.asarray(run), words, names, taken)
        found = self.gpu.over(np.array(words.get()), taken)
        assert isinstance(found["e"], np.ndarray)
        assert isinstance(found["h"], np.ndarray)
        by_shard: list[list[Encoded]] = [[], []]
        for shard, layout in enumerate(PLAN.layouts):
            for placed in layout:
                if placed.partition.variable in names:
                    by_shard[shard].append(self._same(shard, placed, run, found))
        return by_shard, taken

    def _same(self, shard: int, placed: Placed, run: np.ndarray, found: dict[str, Any]) -> Encoded:
        p = placed.partition
        variable = VARIABLES[p.variable]
        gradient = run[LAYOUT.places[p.variable][0]].reshape(variable.shape)[p.row_start : p.row_stop]
        encoded = self.host.encode(shard, placed, gradient)
        parts = found[p.variable]
        assert isinstance(parts, EncodedParts)
        assert parts.shape == variable.shape
        assert bytes(parts.payloads[p]) == bytes(encoded.payload), p
        return encoded

    def settle(self, pushed: tuple[list[list[Encoded]], HeldResidues], shard: int, applied: bool) -> None:
        by_shard, taken = pushed
        self.host.settle(by_shard[shard], applied)
        assert self.gpu._feedback is not None
        self.gpu._feedback.settle(taken, shard, applied)

    def residues(self) -> None:
        """Compare every residue: there or not, and its bits."""
        feedback = self.gpu._feedback
        assert feedback is not None
        kept, lengths = np.array(feedback._kept.get()), np.array(feedback._lengths.get())
        present, residue = np.array(feedback._present.get()), np.array(feedback._residue.get())
        for name in ENCODED:
            first = feedback._runs[name].start
            for shard, p in partitions_of(name):
                blocks = range(first, first + len(block_of(name, shard, p).offsets))
                first = blocks.stop
                mine = self.host._residues.get((shard, p))
                assert {bool(present[block]) for block in blocks} == {mine is not None}
                if mine is not None:
                    here = np.concatenate([residue[kept[b] : kept[b] + lengths[b]] for b in blocks])
                    np.testing.assert_array_equal(here.view(np.uint32), mine.view(np.uint32))


def partitions_of(name: str) -> list[tuple[int, Partition]]:
    return [
        (shard, placed.partition)
        for shard, layout in enumerate(PLAN.layouts)
        for placed in layout
        if placed.partition.variable == name
    ]


def block_of(name: str, shard: int, partition: Partition) -> EncodedPiece:
    variable = VARIABLES[name]
    return EncodedPiece(shard, Encoding.parse(variable.encoding).slice_of(partition, variable.row_elements), 0, 0)


def gradients(seed: int) -> np.ndarray:
    """Return a run with ties, denormals, zeros of both signs, and blocks that are tiny or as large as can be."""
    run = drawn(seed, LAYOUT.elements)
    place, ties = LAYOUT.places["c"][0], LAYOUT.places["f"][0]
    special = np.array([0.0, -0.0, SMALLEST, -SMALLEST, SMALLEST / 8, -1e-45, LARGEST, -LARGEST], np.float32)
    if seed % 3 == 1:
        run[place][:256] = np.resize(special[:6], 256)
    elif seed % 3 == 2:
        run[place][:256] = np.resize(special, 256)
        run[LAYOUT.places["d"][0]] = np.arange(12, dtype=np.float32) * np.float32(127.0 / 22)  # codes that are ties
        run[ties] = np.resize(np.array([1.0, -1.0, 0.5, 2.0], np.float32), ties.stop - ties.start)
    if seed % 3 == 1:
        run[ties] = np.resize(special[:6], ties.stop - ties.start)  # fewer are not 0 than are sent, or all are tiny
    return run


def test_every_step_of_a_residue_has_the_hosts_bits(cupy_somewhere: Any) -> None:
    beside = Beside(cupy_somewhere)
    for step, seed in enumerate((0, 1, 2, 2, 2, 3, 4, 5, 6)):  # what is as large as can be comes again
        pushed = beside.encode(gradients(seed))
        for shard in (1, 0):
            beside.settle(pushed, shard, applied=(step + shard) % 3 > 0)
        beside.residues()


@pytest.mark.parametrize(("least", "most"), [(1, 10_000), (7, 10_000), (1, 3), (1, 1)])
def test_any_division_into_blocks_sends_the_same(
    compiled_cupy: Any, monkeypatch: pytest.MonkeyPatch, least: int, most: int
) -> None:
    monkeypatch.setattr(gpu_blocks, "TOPK_BLOCK_ELEMENTS", least)
    monkeypatch.setattr(gpu_blocks, "TOPK_BLOCKS_MAX", most)
    beside = Beside(compiled_cupy)
    for seed in range(4):
        pushed = beside.encode(gradients(seed))
        for shard in (1, 0):
            beside.settle(pushed, shard, applied=seed != 1)
        beside.residues()


KERNELS = ("correct", "to_int8", "topk_count", "topk_tally", "topk_place", "topk_fill", "leaving")


@pytest.mark.parametrize("failing", KERNELS)
def test_a_push_whose_kernel_cannot_be_launched_spoils_no_later_one(
    compiled_cupy: Any, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    class Failing(CompiledCupy):
        fails = False

        def ElementwiseKernel(self, inputs: str, outputs: str, operation: str, name: str, **more: Any) -> Any:
            kernel = CompiledCupy.ElementwiseKernel(self, inputs, outputs, operation, name, **more)

            def call(*given: Any) -> None:
                if self.fails and name == f"parashard_{failing}":
                    raise RuntimeError(name)
                kernel(*given)

            return call

    cupy = copy(compiled_cupy)
    cupy.__class__ = Failing
    beside = Beside(cupy)
    for seed in range(3):
        pushed = beside.encode(gradients(seed))
        for shard in (1, 0):
            beside.settle(pushed, shard, applied=True)
        taken = beside.gpu.new_residues()
        assert taken is not None
        cupy.fails = True
        with pytest.raises(RuntimeError, match=failing):
            beside.gpu.write(cupy.asarray(gradients(seed + 1)), cupy.empty(beside.gpu.words, np.uint16), ENCODED, taken)
        cupy.fails = False
        for shard in (0, 1):
            beside.gpu._feedback.settle(taken, shard, applied=False)
        beside.residues()


def test_an_outcome_counts_once(cupy_somewhere: Any) -> None:
    beside = Beside(cupy_somewhere)
    pushed = beside.encode(gradients(0))
    beside.settle(pushed, 0, applied=True)
    beside.settle(pushed, 0, applied=False)
    beside.settle(pushed, 1, applied=False)
    beside.residues()


@given(data=st.data())
def test_pushes_that_overlap_settle_as_on_the_host(compiled_cupy: Any, data: st.DataObject) -> None:  # P17
    beside = Beside(compiled_cupy)
    under_way: list[tuple[Any, int]] = []
    for seed in range(data.draw(st.integers(1, 6))):
        names = data.draw(st.sampled_from([ENCODED, ("a", "d"), ("c",), ("f",), ("a", "g")]))
        pushed = beside.encode(gradients(seed), names)
        under_way += [(pushed, 0), (pushed, 1)]
        while under_way and data.draw(st.booleans()):
            one, shard = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            beside.settle(one, shard, data.draw(st.booleans()))
        beside.residues()


def test_a_push_that_is_dropped_gives_back_what_it_has_taken(compiled_cupy: Any) -> None:
    class Push:
        """What holds a step's gradients."""

    beside = Beside(compiled_cupy)
    beside_settled = beside.encode(gradients(0))
    for shard in (0, 1):
        beside.settle(beside_settled, shard, applied=True)
    push, (by_shard, taken) = Push(), beside.encode(gradients(1))
    beside.gpu.settle_when_dropped(push, taken)
    for encoded in by_shard:
        beside.host.settle(encoded, applied=False)
    assert taken.open == {0, 1}
    del push
    assert not taken.open
    beside.residues()

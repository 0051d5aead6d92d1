"""Replay: every record up to the first place that cannot be trusted, and that place is named (P18)."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import StoreFailed, WrongRun
from parashard_server.durability.write_ahead_log.records import (
    HEAD_BYTES,
    HEADER_BYTES,
    LogIdentity,
    decode_header,
    encode_head,
    encode_header,
)
from parashard_server.durability.write_ahead_log.replay import replay
from parashard_server.durability.write_ahead_log.segments import segment_name
from support.log_cases import IDENTITY, RECORD_BYTES_MAX, append, files, head_with, opened, read

FIRST = segment_name(1, 1, 0)
PAGE_BYTES = 4096


def written(folder: Path, *segments: tuple[int, ...], incarnation: int = 1, first: int = 0, elements: int = 3) -> None:
    """Write one incarnation's log: the steps of each of its segments."""
    log = opened(folder, incarnation, first)
    for number, steps in enumerate(segments):
        if number:
            log.roll()
        append(log, *steps, elements=elements)
    log.close()


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


# --- a sound log ---


def test_no_log_is_an_empty_one(tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        steps, end = read(folder, 7)
        assert (steps, end.position, end.reason, end.place) == ([], 7, "end", "")


def test_segments_are_read_one_after_the_other_in_the_order_of_their_writing(tmp_path):
    written(tmp_path, (4, 2), (), (9,), (1, 0, 7))
    steps, end = read(tmp_path)
    assert (steps, end.position, end.reason) == ([4, 2, 9, 1, 0, 7], 6, "end")
    place = tmp_path / segment_name(1, 4, 3)
    assert end.place == f"{place}, byte {place.stat().st_size}: nothing more"


@pytest.mark.parametrize("position", range(8))
def test_records_that_the_checkpoint_has_are_not_read(tmp_path, position):
    written(tmp_path, (0, 1), (2,), (3, 4, 5))
    steps, end = read(tmp_path, position)
    assert (steps, end.position, end.reason) == (list(range(position, 6)), max(6, position), "end")


def test_a_damaged_segment_that_the_checkpoint_covers_does_no_harm(tmp_path):
    written(tmp_path, (0, 1), (2, 3))
    (tmp_path / FIRST).write_bytes(b"")
    assert read(tmp_path, 2)[0] == [2, 3]


def test_other_files_are_not_looked_at(tmp_path):
    written(tmp_path, (0,))
    for name in ("i1-n2-p1.log", "i000000001-n00000002-p000000000001.log", f"{segment_name(2, 1, 0)}.old", "x.log"):
        (tmp_path / name).write_bytes(b"no segment")
    (tmp_path / "i٠٠٠٠٠٠٠2-n00000002-p000000000001.log").touch()
    steps, end = read(tmp_path)
    assert (steps, end.reason) == ([0], "end")


# --- incarnations ---


def test_a_successor_takes_over_where_its_replay_ended(tmp_path):  # P3
    zombie = opened(tmp_path, 1)
    append(zombie, 0, 1)
    successor = opened(tmp_path, 2, read(tmp_path)[1].position)
    append(successor, 12, 13)
    append(zombie, 2, 3, 4)  # it writes on, and begins another segment
    zombie.roll()
    append(zombie, 5)
    for position, steps in ((0, [0, 1, 12, 13]), (1, [1, 12, 13]), (3, [13]), (4, [])):
        assert read(tmp_path, position)[0] == steps
    for log in (zombie, successor):
        log.close()


def test_the_newest_incarnation_ends_every_older_one(tmp_path):  # P3
    written(tmp_path, (0, 1, 2, 3))
    written(tmp_path, (14, 15), incarnation=2, first=4)
    written(tmp_path, (21, 22), incarnation=3, first=1)  # it had to begin further back: damage at record 1
    assert read(tmp_path)[0] == [0, 21, 22]


def test_an_incarnation_that_wrote_nothing_changes_nothing(tmp_path):
    written(tmp_path, (0, 1))
    written(tmp_path, (), incarnation=2, first=2)
    (tmp_path / segment_name(3, 1, 2)).touch()  # it died before its header was written
    written(tmp_path, (2,), incarnation=4, first=2)
    assert read(tmp_path)[0] == [0, 1, 2]


def test_a_successors_damaged_header_does_not_bring_the_zombie_back(tmp_path):  # P3
    written(tmp_path, (0, 1, 2, 3))
    written(tmp_path, (12, 13), incarnation=2, first=2)
    change(tmp_path / segment_name(2, 1, 2), 0, b"?")
    steps, end = read(tmp_path)
    assert (steps, end.position, end.reason) == ([0, 1], 2, "damage")


def test_what_a_torn_record_hid_is_read_from_the_successor(tmp_path):
    written(tmp_path, (0, 1, 2))
    path = tmp_path / FIRST
    path.write_bytes(path.read_bytes()[:-1])
    written(tmp_path, (12,), incarnation=2, first=read(tmp_path)[1].position)
    assert read(tmp_path)[0] == [0, 1, 12]


# --- ends ---


def test_a_tail_torn_at_any_byte_is_dropped(tmp_path):
    written(tmp_path, (0, 1, 2))
    path = tmp_path / FIRST
    content = path.read_bytes()
    record_bytes = (len(content) - HEADER_BYTES) // 3
    for length in range(len(content)):
        path.write_bytes(content[:length])
        steps, end = read(tmp_path)
        whole, rest = divmod(max(0, length - HEADER_BYTES), record_bytes)
        torn_at = 0 if length < HEADER_BYTES else HEADER_BYTES + whole * record_bytes
        assert steps == [0, 1, 2][:whole]
        assert (end.position, end.reason) == (whole, "torn tail" if rest or length < HEADER_BYTES else "end")
        assert f"{FIRST}, byte {torn_at}: " in end.place


def test_a_tail_torn_at_any_page_is_dropped(tmp_path):
    written(tmp_path, (0, 1, 2), elements=5000)
    path = tmp_path / FIRST
    content = path.read_bytes()
    for length in range(PAGE_BYTES, len(content), PAGE_BYTES):
        path.write_bytes(content[:length])
        steps, end = read(tmp_path)
        assert (steps, end.reason) == ([0, 1, 2][: (length - HEADER_BYTES) // (HEAD_BYTES + 20_000)], "torn tail")


def test_a_page_that_never_reached_the_disk_is_damage(tmp_path):
    written(tmp_path, (0, 1, 2), elements=5000)
    path = tmp_path / FIRST
    content = path.read_bytes()
    for start in range(0, len(content), PAGE_BYTES):
        path.write_bytes(content)
        change(path, start, bytes(min(PAGE_BYTES, len(content) - start)))
        steps, end = read(tmp_path)
        assert (steps, end.reason) == ([0, 1, 2][: (start - HEADER_BYTES) // (HEAD_BYTES + 20_000)], "damage") or (
            start == 0 and (steps, end.reason) == ([], "damage")
        )


def test_damage_is_named_and_ends_the_replay(tmp_path):
    written(tmp_path, (0, 1, 2), (3,))
    record_bytes = HEAD_BYTES + 12
    change(tmp_path / FIRST, HEADER_BYTES + 2 * record_bytes - 1, b"?")
    steps, end = read(tmp_path)
    assert (steps, end.position, end.reason) == ([0], 1, "damage")
    what = "the gradient of step 1 does not match its checksum"
    assert end.place == f"{tmp_path / FIRST}, byte {HEADER_BYTES + record_bytes}: {what}"


def test_a_missing_or_cut_segment_is_a_gap(tmp_path):
    written(tmp_path, (0, 1), (2, 3), (4,))
    middle, last = tmp_path / segment_name(1, 2, 2), tmp_path / segment_name(1, 3, 4)
    middle.write_bytes(middle.read_bytes()[:-1])
    steps, end = read(tmp_path)
    assert (steps, end.position, end.reason) == ([0, 1, 2], 3, "gap")
    assert end.place == f"{last}, byte 0: the segment begins with record 4"
    middle.unlink()
    assert read(tmp_path)[1].position == 2
    assert read(tmp_path, 4)[0] == [4]


def test_a_renamed_segment_is_damage(tmp_path):
    written(tmp_path, (0,), (1,))
    (tmp_path / FIRST).replace(tmp_path / segment_name(1, 2, 1))
    steps, end = read(tmp_path, 1)
    assert (steps, end.reason) == ([], "damage")
    assert f"the header is of {FIRST}" in end.place


def test_a_record_out_of_its_turn_is_damage(tmp_path):
    seed = decode_header(header := encode_header(IDENTITY, 1, 1, 0)).seed
    heads = [
        encode_head(seed, position=position, step=1, payload=[], zero=True, skipped=False, staleness=None)
        for position in (0, 2)
    ]
    (tmp_path / FIRST).write_bytes(header + b"".join(heads))
    replaying = replay(tmp_path, IDENTITY, 0, RECORD_BYTES_MAX)
    assert len(list(replaying)) == 1
    assert replaying.ended.place.endswith("record 2 lies where 1 belongs")


def test_a_file_that_cannot_be_read_is_damage(tmp_path):
    written(tmp_path, (0,))
    (tmp_path / FIRST).unlink()
    (tmp_path / FIRST).mkdir()
    assert read(tmp_path)[1].reason == "damage"


def test_a_folder_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match="cannot list the push log: Not a directory"):
        read(tmp_path / "file")


@pytest.mark.parametrize(
    "other",
    [
        LogIdentity("run-2", "d" * 64, 1, 0),
        LogIdentity("run-1", "e" * 64, 1, 0),
        LogIdentity("run-1", "d" * 64, 2, 0),
        LogIdentity("run-1", "d" * 64, 1, 1),
    ],
)
def test_another_runs_plans_or_shards_log_is_refused(tmp_path, other):  # P2
    written(tmp_path, (0,))
    with pytest.raises(WrongRun, match=r"plan 1, shard 0; this is shard \d of plan \d of run run-\d"):
        list(replay(tmp_path, other, 0, RECORD_BYTES_MAX))


def test_the_end_is_reported_at_the_end_only(tmp_path):
    written(tmp_path, (0,))
    with pytest.raises(AssertionError, match="has not been read to its end"):
        _ = replay(tmp_path, IDENTITY, 0, RECORD_BYTES_MAX).ended


# --- any bytes ---


def test_nothing_over_the_bound_is_allocated(tmp_path):
    seed = decode_header(header := encode_header(IDENTITY, 1, 1, 0)).seed
    written(tmp_path, (0,), elements=50_000)
    for declared in (tmp_path / FIRST).read_bytes(), header + head_with(0, 2**62, seed):
        (tmp_path / FIRST).write_bytes(declared)
        tracemalloc.start()
        try:
            steps, end = read(tmp_path, record_bytes_max=1000)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (steps, end.reason) == ([], "damage")
        assert "allowed are 1000" in end.place
        assert peak_bytes < 100_000


@given(st.data())
def test_any_bytes_end_the_replay_and_never_break_it(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("log")
    header = encode_header(IDENTITY, 1, 1, 0)
    written(folder, (0, 1, 2))
    sound = (folder / FIRST).read_bytes()
    start = data.draw(st.sampled_from([b"", header, sound, sound[: len(sound) // 2]]))
    sizes_bytes = st.integers(0, 40) | st.integers(0, 2**64 - 1)
    heads = st.builds(head_with, st.integers(0, 15), sizes_bytes, st.just(decode_header(header).seed))
    strange = data.draw(st.binary(max_size=2 * HEAD_BYTES) | st.binary(min_size=HEAD_BYTES, max_size=300) | heads)
    (folder / FIRST).write_bytes(start + strange + data.draw(st.binary(max_size=60)))
    steps, end = read(folder)
    assert steps == [0, 1, 2][: len(steps)]
    assert end.reason in ("end", "torn tail", "damage")
    assert files(folder) == [FIRST]

"""`parashard checkpoint`: lists, verifies and exports what lies in a store, whether the run is up or not."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from parashard.checkpoints.catalogue import RUN_NAME, CheckpointId
from parashard.cli import checkpoint
from parashard.cli.checkpoint import write_model
from parashard.errors import ConfigurationError
from parashard.process.shell import ExitCode
from parashard.protocol.coordinator_client import ADDRESS_FILE
from parashard.store import Store, open_store
from support.checkpoint_cases import STEPS, model_of, write_drained, write_shard
from support.command_line import Ran, run_command
from support.small_job import SMALL_JOB

NEWER = CheckpointId(1, 0, 2, 5)


Command = Callable[..., Ran]


@pytest.fixture
def parashard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `parashard checkpoint` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str) -> Ran:
        return run_command(monkeypatch, capsys, "checkpoint", *arguments)

    return run


@pytest.fixture
def run_store(tmp_path: Path) -> Store:
    """Return the store of the run directory `run`, with a drained checkpoint and a newer one of shard 0."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text(SMALL_JOB)
    store = open_store(str(tmp_path / "run" / "checkpoints"))
    write_drained(store)
    write_shard(store, NEWER, round=4)
    return store


def damage(store: Store, name: str) -> None:
    content = store.read(name, 1 << 20)
    store.replace(name, content[:-1] + b"?")


def refused(ran: Ran, part: str) -> bool:
    """Tell whether a command ended with one line, the user's to act on, that has `part` in it."""
    return ran.exit_code == ExitCode.CONFIGURATION and ran.out == "" and ran.err.count("\n") == 1 and part in ran.err


# --- ls ---


def test_ls_lists_shards_and_drained_checkpoints(parashard, run_store):
    ran = parashard("ls", "run")
    assert ran.exit_code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert [line[0] for line in lines] == ["id", "p1/s0/i1/c1", "p1/s0/i2/c5", "p1/s1/i1/c1", "j1"]
    assert lines[1][-1] == "pinned"
    assert lines[2][1:3] == [str(STEPS), "4"]
    assert lines[4][-1] == "drained"


def test_ls_as_json(parashard, run_store):
    rows = {row["id"]: row for row in json.loads(parashard("ls", "run", "--json").out)}
    assert (rows["p1/s0/i1/c1"]["pinned"], rows[str(NEWER)]["pinned"]) == (True, False)
    assert (rows[str(NEWER)]["steps"], rows[str(NEWER)]["round"], rows[str(NEWER)]["written_at"]) == (STEPS, 4, 1.5)
    assert rows["j1"]["parts"] == ["p1/s0/i1/c1", "p1/s1/i1/c1"]
    assert (rows["j1"]["kind"], rows["j1"]["steps"], rows["j1"]["final"]) == ("drained", STEPS, False)
    assert rows["j1"]["size_bytes"] == sum(rows[f"p1/s{s}/i1/c1"]["size_bytes"] for s in (0, 1))


def test_ls_shows_what_is_damaged_and_goes_on(parashard, run_store):
    damage(run_store, NEWER.manifest_name)
    damage(run_store, CheckpointId(1, 1, 1, 1).manifest_name)
    rows = json.loads(parashard("ls", "run", "--json").out)
    assert [row["id"] for row in rows if "damage" in row] == [str(NEWER), "p1/s1/i1/c1", "j1"]
    assert "damaged: " in parashard("ls", "run").out


def test_ls_of_an_empty_store_is_empty(parashard, run_store, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "job.toml").write_text(SMALL_JOB)
    assert json.loads(parashard("ls", "new", "--json").out) == []


# --- which store ---


def test_the_store_is_the_newest_runs_unless_given(parashard, run_store, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").rename(tmp_path / "runs" / "small-1")
    (tmp_path / "runs" / "small-1" / ADDRESS_FILE).write_text("{}")
    assert "j1" in parashard("ls").out


def test_a_store_is_named_by_path_or_url(parashard, run_store, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (folder / RUN_NAME).write_bytes(b"")
    assert "j1" in parashard("ls", "run/checkpoints").out
    assert "j1" in parashard("ls", f"file://{folder}").out


def test_a_run_says_where_its_store_is(parashard, run_store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    url = f"file://{tmp_path / 'run' / 'checkpoints'}"
    (tmp_path / "elsewhere" / "job.toml").write_text(f'{SMALL_JOB}[checkpoint]\nurl = "{url}"\n')
    assert "j1" in parashard("ls", "elsewhere").out


def test_a_place_that_is_neither_is_the_users_to_fix(parashard):
    assert refused(parashard("ls", "nowhere"), "nowhere: neither a run directory (no job.toml)")
    assert refused(parashard("ls"), "no run directory under runs/")


# --- verify ---


def test_verify_says_that_every_byte_was_read(parashard, run_store):
    ran = parashard("verify", "run")
    assert ran.exit_code == 0
    assert "3 of shards, 1 drained: every byte verified" in ran.out


def test_verify_names_each_damaged_file_and_exits_with_1(parashard, run_store):
    names = [f"{NEWER.folder}/{name}-0.safetensors" for name in ("variables", "slots")]
    for name in names:
        damage(run_store, name)
    ran = parashard("verify", "run")
    assert ran.exit_code == 1
    lines = ran.out.splitlines()
    assert [name in line for name, line in zip(names, lines, strict=False)] == [True, True]
    assert lines[-1].endswith("2 damaged")


def test_verify_of_one_checkpoint(parashard, run_store):
    damage(run_store, f"{NEWER.folder}/variables-0.safetensors")
    assert parashard("verify", "run", "--id", "j1").exit_code == 0
    assert parashard("verify", "run", "--id", "p1/s0/i1/c1").exit_code == 0
    assert parashard("verify", "run", "--id", str(NEWER)).exit_code == 1
    assert parashard("verify", "run", "--id", "j2").exit_code == 1
    assert refused(parashard("verify", "run", "--id", "newest"), "allowed: a shard's such as p1/s0/i3/c7")


# --- export ---


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_export_writes_the_whole_model(parashard, run_store, suffix):
    ran = parashard("export", "run", "--output", f"out/model{suffix}")
    assert ran.exit_code == 0, ran.err
    assert f"model{suffix}: 2 variables of j1, after {STEPS} steps" in ran.out
    path = Path(f"out/model{suffix}")
    arrays = load_file(path) if suffix == ".safetensors" else np.load(path, allow_pickle=False)
    due = model_of(0)
    assert sorted(arrays) == sorted(due)
    assert all(arrays[name].tobytes() == due[name].tobytes() for name in due)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_export_says_beside_the_model_how_inputs_are_made(parashard, run_store):
    run_store.create("preprocessing.json", b"{}")
    assert parashard("export", "run", "--output", "out/model.safetensors").exit_code == 0
    assert Path("out/model.preprocessing.json").read_bytes() == b"{}"


def test_export_takes_the_newest_or_the_one_that_is_named(parashard, run_store):
    write_drained(run_store, number=2, seed=7)
    parashard("export", "run", "--output", "newest.npz")
    parashard("export", "run", "--output", "first.npz", "--id", "j1")
    for file, seed in (("newest.npz", 7), ("first.npz", 0)):
        assert np.load(file)["dense/bias"].tobytes() == model_of(seed)["dense/bias"].tobytes()


def test_a_damaged_checkpoint_is_not_exported(parashard, run_store):
    damage(run_store, f"{CheckpointId(1, 0, 1, 1).folder}/variables-0.safetensors")
    ran = parashard("export", "run", "--output", "model.npz")
    assert ran.exit_code == 1
    assert "variables-0.safetensors: SHA-256" in ran.err
    assert not Path("model.npz").exists()


def test_what_cannot_be_exported_is_the_users_to_fix(parashard, run_store, tmp_path):
    assert refused(parashard("export", "run", "--output", "model.pt"), "allowed: .safetensors, .npz")
    assert refused(parashard("export", "run", "--output", "m.npz", "--id", str(NEWER)), "only drained checkpoints")
    (tmp_path / "file").touch()
    assert refused(parashard("export", "run", "--output", "file/model.npz"), "cannot be written")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "job.toml").write_text(SMALL_JOB)
    assert refused(parashard("export", "new", "--output", "m.npz"), "there is no drained checkpoint")


def test_names_that_numpy_takes_for_its_own_are_exported(tmp_path):
    arrays = {name: np.float32([i]) for i, name in enumerate(("file", "allow_pickle", "arr_0", "a/b", "é"))}
    write_model(tmp_path / "m.npz", arrays)
    assert {name: array[0] for name, array in np.load(tmp_path / "m.npz").items()} == {
        n: a[0] for n, a in arrays.items()
    }


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(b"old")

    def full(*arguments: object) -> None:
        next(a for a in arguments if isinstance(a, Path)).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_arrays", full)
    monkeypatch.setattr(checkpoint, "_write_npz", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        write_model(path, {"a": np.float32([1])})
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [(path.name, b"old")]

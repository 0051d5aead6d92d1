"""What a script that is started again goes on with, what its earlier calls return, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import parashard
import parashard as ps
from parashard.api import trainer as module
from parashard.api.code import code_of
from parashard.errors import ConfigurationError
from parashard.launch.programs import ResumeFlags, program_of, write_program
from parashard.launch.run_folders import launcher_lock
from parashard.models.declaration import read_declaration
from support.played_fits import Line, Runs, X, Y, played_runs  # noqa: F401  # a fixture


def interrupted_in_the_second(runs: Runs, **second: Any) -> tuple[Path, Path]:
    """Return the folders of a script's first fit, which is done, and of its second, which is not."""
    runs.started_again()
    first = ps.Trainer(Line(), **second).fit((X, Y), epochs=2, resume=True, verbose=0)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        ps.Trainer(Line(), **second).fit((X, Y), epochs=9, resume=True, verbose=0)
    runs.started_again()
    return first.run_dir, runs.jobs[-1].folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"
    }


def test_a_script_is_resumed_at_the_call_that_was_interrupted(runs: Runs) -> None:
    runs.exit_code = 130
    first, second = ps.Trainer(Line()), ps.Trainer(Line())
    with pytest.raises(KeyboardInterrupt):
        first.fit((X, Y), verbose=0)
    runs.started_again()
    history = first.fit((X, Y), resume=True, verbose=0)
    assert history.run_dir == runs.jobs[0].folder, "it goes on"
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        second.fit((X, Y), verbose=0)
    runs.started_again()
    first, second = ps.Trainer(Line()), ps.Trainer(Line())
    begun = len(runs.jobs)
    assert first.fit((X, Y), resume=True, verbose=0).run_dir == history.run_dir
    assert len(runs.jobs) == begun, "it is done, and answered from what the second one kept"
    assert second.fit((X, Y), resume=True, verbose=0).run_dir == runs.jobs[begun - 1].folder


def test_a_run_is_not_left_behind_where_the_fit_before_it_is_made_anew(runs: Runs) -> None:
    first, second = ps.Trainer(Line()), ps.Trainer(Line())
    first.fit((X, Y), verbose=0)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        second.fit((X, Y), verbose=0)
    runs.started_again()
    first.fit((X, Y), verbose=0)
    with pytest.raises(
        ConfigurationError, match=r"is not done, and a fit before .* give each fit of the script resume"
    ):
        second.fit((X, Y), resume=True, verbose=0)
    second.fit((X, Y), verbose=0)  # anew, too


def test_a_run_that_another_start_has_begun_meanwhile_is_its_own_affair(runs: Runs) -> None:
    trainer, other = ps.Trainer(Line()), ps.Trainer(Line())
    runs.started_again()
    first = trainer.fit((X, Y), resume=True, verbose=0)
    results = module.SCRIPT.results
    runs.started_again()
    other.fit((X, Y), resume=True, verbose=0)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        other.fit((X, Y), resume=True, verbose=0)
    theirs = runs.jobs[-1].folder
    runs.started_again()
    module.SCRIPT._calls, module.SCRIPT.results = 1, results  # the first process again
    mine = trainer.fit((X, Y), resume=True, verbose=0).run_dir
    assert mine not in (first.run_dir, theirs)


def test_an_edited_script_goes_on_where_that_is_accepted(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    script, trainer = Path("train.py"), ps.Trainer(Line())

    def fit(**arguments: Any) -> ps.History:
        runs.started_again(runs.exit_code)
        return trainer.fit((X, Y), resume=True, **arguments)

    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        fit()
    run_dir = runs.jobs[0].folder
    begun = read_declaration(run_dir).model_sha256
    script.write_text("loss = 1")
    before = contents(run_dir)
    with pytest.raises(
        ConfigurationError,
        match=r"\(it is kept in .*train\.py\).* go on with it: accept_code_change=True",
    ):
        fit(verbose=0)
    assert contents(run_dir) == before
    assert len(runs.jobs) == 1
    with pytest.raises(KeyboardInterrupt):
        fit(accept_code_change=True)
    assert "going on with code that was changed since the run began" in capsys.readouterr().out
    code = code_of(run_dir)
    assert code is not None
    assert (code.identity, code.is_changed, read_declaration(run_dir).model_sha256) == (begun, True, begun)
    runs.exit_code = 0
    report = fit(verbose=0).report  # what was accepted once is known
    assert report["accepted_code_sha256"] == code.present.sha256
    assert json.loads((run_dir / "report.json").read_text()) == report
    with pytest.raises(ConfigurationError, match="accept_code_change is of a run that is resumed"):
        trainer.fit((X, Y), accept_code_change=True)


def test_a_run_whose_files_somebody_touches_stays_an_old_one(runs: Runs) -> None:
    first, second = interrupted_in_the_second(runs)
    begun = len(runs.jobs)
    (first / "plot.svg").touch()
    for path in (first / "job.toml", first):
        os.utime(path, (2**31, 2**31))
    trainer = ps.Trainer(Line())
    assert trainer.fit((X, Y), epochs=2, resume=True, verbose=0).run_dir == first
    assert len(runs.jobs) == begun, "answered"
    assert trainer.fit((X, Y), epochs=9, resume=True, verbose=0).run_dir == second


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "epochs": ({}, {"epochs": 3}, "epochs is 3 here and 2 there"),
    "data": ({}, {"data": (X + 1, Y)}, "the data are others"),
    "optimizer": ({"optimizer": ps.Adam(0.5)}, {}, "optimizer"),
    "seed": ({"seed": 5}, {}, "seed is 5 here and 0 there"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_was_changed_is_not_answered(runs: Runs, change: str) -> None:
    trainer, call, says = CHANGES[change]
    interrupted_in_the_second(runs)
    begun = len(runs.jobs)
    with pytest.raises(ConfigurationError, match=rf"this call is not the one that made that run: .*{says}"):
        ps.Trainer(Line(), **trainer).fit(**{"data": (X, Y), "epochs": 2, "resume": True, "verbose": 0} | call)
    assert len(runs.jobs) == begun


def test_another_script_is_not_answered(runs: Runs) -> None:
    interrupted_in_the_second(runs)
    Path("train.py").write_text("loss = 'another'")
    runs.started_again()
    with pytest.raises(ConfigurationError, match=r"train\.py was edited since"):
        ps.Trainer(Line()).fit((X, Y), epochs=2, resume=True, verbose=0)


def test_a_script_goes_on_whose_trainers_have_names(runs: Runs) -> None:
    first = ps.Trainer(Line(), name="first").fit((X, Y), resume=True, verbose=0)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        ps.Trainer(Line(), name="second").fit((X, Y), resume=True, verbose=0)
    second = runs.jobs[-1].folder
    runs.started_again()
    assert ps.Trainer(Line(), name="first").fit((X, Y), resume=True, verbose=0).run_dir == first.run_dir
    assert ps.Trainer(Line(), name="second").fit((X, Y), resume=True, verbose=0).run_dir == second


def test_each_name_has_runs_apart(runs: Runs) -> None:
    for seed in (1, 2):
        runs.started_again(130)
        with pytest.raises(KeyboardInterrupt):
            ps.Trainer(Line(), seed=seed, name=f"seed{seed}").fit((X, Y), resume=True, verbose=0)
    runs.started_again()
    assert ps.Trainer(Line(), seed=1, name="seed1").fit((X, Y), resume=True, verbose=0).run_dir == runs.jobs[0].folder


def test_a_fit_that_failed_before_the_interrupted_one_fails_again(runs: Runs) -> None:
    runs.exit_code = 1
    with pytest.raises(ps.JobFailed, match="why"):
        ps.Trainer(Line()).fit((X, Y), resume=True, verbose=0)
    shutil.rmtree(runs.jobs[-1].folder)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        ps.Trainer(Line()).fit((X, Y), resume=True, verbose=0)
    runs.started_again()
    begun = len(runs.jobs)
    with pytest.raises(ps.JobFailed, match="why"):
        ps.Trainer(Line()).fit((X, Y), resume=True, verbose=0)
    assert len(runs.jobs) == begun
    assert ps.Trainer(Line()).fit((X, Y), resume=True, verbose=0).run_dir == runs.jobs[begun - 1].folder


def test_a_call_whose_weights_are_gone_is_refused(runs: Runs) -> None:
    first, _ = interrupted_in_the_second(runs)
    shutil.rmtree(first)
    with pytest.raises(ConfigurationError, match=r"from the weights of .*, which are gone"):
        ps.Trainer(Line()).fit((X, Y), epochs=2, resume=True, verbose=0)


def test_a_folder_that_was_moved_with_its_script_goes_on(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = interrupted_in_the_second(runs)
    for name in ("train.py", "runs"):
        (tmp_path / "moved").mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "moved" / name)
    monkeypatch.chdir(tmp_path / "moved")
    module.SCRIPT._file = str(tmp_path / "moved" / "train.py")
    trainer = ps.Trainer(Line())
    moved = trainer.fit((X, Y), epochs=2, resume=True, verbose=0).run_dir
    assert moved == tmp_path / "moved" / "runs" / first.name
    assert trainer.fit((X, Y), epochs=9, resume=True, verbose=0).run_dir.name == second.name


def test_a_start_that_is_refused_changes_nothing_in_the_folder_of_another_process(runs: Runs) -> None:
    _, second = interrupted_in_the_second(runs)
    lock, before = launcher_lock(second), contents(second)
    trainer = ps.Trainer(Line())
    trainer.fit((X, Y), epochs=2, resume=True, verbose=0)
    begun = len(runs.jobs)
    with pytest.raises(ConfigurationError, match="works in it, or a script"):
        trainer.fit((X, Y), epochs=9, resume=True, accept_code_change=True, verbose=0)
    os.close(lock)
    assert contents(second) == before
    assert len(runs.jobs) == begun


def test_a_run_whose_changed_job_is_refused_stays_as_it_was(runs: Runs) -> None:
    _, second = interrupted_in_the_second(runs)
    before = contents(second)
    runs.exit_code, runs.accepted = 2, False
    ps.Trainer(Line()).fit((X, Y), epochs=2, resume=True, verbose=0)
    with pytest.raises(ConfigurationError, match="why"):
        ps.Trainer(Line()).fit((X * 2, Y), epochs=9, resume=True, verbose=0)
    assert contents(second) == before


def test_a_run_that_another_process_has_ended_meanwhile_is_left_as_it_is(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = interrupted_in_the_second(runs)
    trainer = ps.Trainer(Line())
    trainer.fit((X, Y), epochs=2, resume=True, verbose=0)
    begun = len(runs.jobs)
    monkeypatch.setattr("parashard.api.fits.is_done", lambda run_dir: True)
    with pytest.raises(ConfigurationError, match="another process has gone on with it"):
        trainer.fit((X, Y), epochs=9, resume=True, verbose=0)
    assert len(runs.jobs) == begun
    assert (second / "job.toml").exists()


def test_a_start_that_is_told_to_goes_on_without_an_edit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = interrupted_in_the_second(runs)
    monkeypatch.setattr(parashard._started, "resume", "1")
    trainer = ps.Trainer(Line())
    assert trainer.fit((X, Y), epochs=2, verbose=0).run_dir == first
    assert trainer.fit((X, Y), epochs=9, verbose=0).run_dir == second


def test_it_goes_on_with_the_run_that_it_is_told_and_begins_what_comes_after(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = interrupted_in_the_second(runs)
    runs.started_again()
    ps.Trainer(Line()).fit((X, Y), epochs=2, verbose=0)
    runs.exit_code = 130
    with pytest.raises(KeyboardInterrupt):
        ps.Trainer(Line()).fit((X, Y), epochs=9, verbose=0)
    runs.started_again()
    begun = len(runs.jobs)
    monkeypatch.setattr(parashard._started, "resume", str(older[1]))
    trainer = ps.Trainer(Line())
    assert trainer.fit((X, Y), epochs=2, verbose=0).run_dir == older[0]
    assert trainer.fit((X, Y), epochs=9, verbose=0).run_dir == older[1]
    third = trainer.fit((X, Y), epochs=1, verbose=0).run_dir
    assert third not in [run.folder for run in runs.jobs[:begun]]


def test_a_run_of_another_script_is_not_gone_on_with(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = interrupted_in_the_second(runs)
    program = program_of(second)
    assert program is not None
    Path("other.py").touch()
    write_program(second, program._replace(script=str(Path("other.py").absolute())))
    monkeypatch.setattr(parashard._started, "resume", str(second))
    with pytest.raises(ConfigurationError, match=r"is a run of another script than train\.py"):
        ps.Trainer(Line()).fit((X, Y), epochs=2, verbose=0)


def test_flags_of_resume_come_before_what_the_script_says(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ResumeFlags([("cluster.shards", 3, "--shards"), ("checkpoint.keep", 7, "--set")], "j2")
    monkeypatch.setattr(parashard._started, "resume_flags", json.dumps(flags))
    ps.Trainer(Line(), strategy=ps.ParameterServerStrategy(shards=1)).fit((X, Y), verbose=0)
    [run] = runs.jobs
    assert (run.job.cluster.shards, run.job.checkpoint.keep) == (3, 7)
    with pytest.raises(ConfigurationError, match="--shards: OneDeviceStrategy has no cluster"):
        ps.Trainer(Line(), strategy=ps.OneDeviceStrategy()).fit((X, Y), verbose=0)

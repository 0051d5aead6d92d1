"""What the command line says of itself and of a job: version, help, completion, `parashard config`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from parashard import __version__
from parashard.cli.main import COMMANDS, app


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(parashard, word):
    assert parashard(word) == (0, f"parashard {__version__}\n", "")


def test_the_module_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "parashard", "version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"parashard {__version__}\n"


def test_a_letter_that_a_terminal_lacks_ends_no_command(parashard):
    Path("job.toml").write_text(Path("job.toml").read_text() + '\n[checkpoint]\nurl = "東京"\n')
    ran = subprocess.run(
        [sys.executable, "-m", "parashard", "config", "job.toml"],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert b"\\u6771\\u4eac" in ran.stdout


def test_config_as_json_tells_every_value_and_its_origin(parashard, monkeypatch):
    monkeypatch.setenv("PARASHARD_JOB__SEED", "7")
    ran = parashard("config", "job.toml", "--json", "--workers", "3", "--set", "model.kind=mlp", "--set", "job.seed=8")
    assert (ran.exit_code, ran.err, ran.out.count("\n")) == (0, "", 1)
    values = json.loads(ran.out)
    assert values["job.epochs"] == {"value": 2, "origin": "file job.toml"}
    assert values["cluster.workers"] == {"value": 3, "origin": "flag --workers"}
    assert values["job.seed"] == {"value": 8, "origin": "flag --set"}  # flag > environment
    assert values["model.kind"]["value"] == "mlp"
    assert values["cluster.shards"]["origin"] == "default"
    assert parashard("config", "job.toml", "--json").out.count('"environment PARASHARD_JOB__SEED"') == 1


def test_config_as_a_table_has_a_line_for_every_value(parashard):
    keys = json.loads(parashard("config", "job.toml", "--json").out)
    ran = parashard("config", "job.toml")
    assert (ran.exit_code, ran.err) == (0, "")
    assert {line.split()[0] for line in ran.out.splitlines()[1:]} >= set(keys)


def test_help_begins_with_run_and_shows_no_type_of_flags(parashard):
    said = parashard("--help").out
    commands = [line.split()[0] for line in said.partition("Commands:\n")[2].splitlines()]
    assert commands[:2] == ["run", "resume"]
    for words in [["--help"], ["run", "--help"], ["checkpoint", "ls", "--help"], ["certs", "--help"]]:
        assert "bool" not in parashard(*words).out.lower(), words


def test_help_tells_the_whole_first_paragraph_of_a_command(parashard):
    # click would cut it: "Make a certificate authority; keep its key where no shard or..."
    assert "..." not in parashard("certs", "--help").out.partition("Commands:")[2]


def test_help_says_of_a_command_what_its_own_help_says():
    # It does so without importing the command's file.
    line = typer.main.get_command(app)
    told = dict(line.listed())
    commands = {name: line.get_command(None, name) for name in COMMANDS}
    own = {name: " ".join(command.help.partition("\n\n")[0].split()) for name, command in commands.items()}
    assert told == own


def test_a_shell_is_given_what_completes_commands(parashard, monkeypatch):
    Path("runs/digits-1").mkdir(parents=True)
    Path("runs/digits-1/job.toml").touch()
    monkeypatch.setenv("_PARASHARD_COMPLETE", "complete_bash")
    for typed, words in {"parashard ru": ["run", "runs"], "parashard resume dig": ["digits-1"]}.items():
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        assert parashard().out.split() == words


def test_help_is_shown_without_a_command(parashard):
    ran = parashard()
    assert "parameter server" in ran.out + ran.err
    assert parashard("--help").exit_code == 0

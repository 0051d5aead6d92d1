"""Commands of the pages are ones that the command line takes: their flags, values and keys of `--set`; none is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples" / "digits.toml"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/runbooks/*.md")])
BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r" *\$ (?:ray job submit .* -- )?parashard ([^$]*)")  # without variables of the shell
SENTENCE = re.compile(r"`parashard (\w[^` ]* [^`]*)`")
WHOLE_IN_SENTENCES = {"hosts.md", "ray.md", "slurm.md"}  # other pages also name parts of a command there
OF_THE_SHELL = (">", "|", "&")
STANDS_FOR = {"N": "1", "X": "1", "S": "STOP", "ROLE": "worker", "k=v": "job.seed=1"}

Parse = Callable[[str], Mapping[str, Any]]


def commands_of(page: Path) -> Iterator[str]:
    """Yield what follows `parashard` in each command of a page."""
    text = page.read_text()
    for block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (found[1] for found in map(COMMAND.fullmatch, lines) if found)
    if page.name in WHOLE_IN_SENTENCES:
        yield from SENTENCE.findall(text)


def words_of(line: str) -> list[str]:
    """Return a command's words; those of a synopsis with all that is optional, and the first of what is allowed."""
    said = re.sub(r" \[([^]]*)\]", r" \1", line.partition("#")[0])
    words = [word.partition("|")[0] or word for word in shlex.split(said)]
    end = next((at for at, word in enumerate(words) if word in OF_THE_SHELL), len(words))
    return [STANDS_FOR.get(word, word) for word in words[:end]]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Return a function that has a command line read, and no command run; it returns what the command would get."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(TyperCommand, "invoke", lambda _, context: given.update(context.params))

    def read(line: str) -> dict[str, Any]:
        given.clear()
        ran = CliRunner().invoke(app, words_of(line))
        assert ran.exit_code == 0, f"parashard {line}\n{ran.output}"
        if sets := given.get("set_"):
            job = ROOT / str(given.get("job", ""))
            load_job(job if job.is_file() else DIGITS, [parse_set(text) for text in sets], environ={})
        return dict(given)

    return read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_taken(parse: Parse, page: Path) -> None:
    for line in commands_of(page):
        parse(line)


def test_mistakes_in_commands_of_pages_are_found(parse: Parse) -> None:
    hosts = list(commands_of(ROOT / "docs" / "hosts.md"))
    assert "doctor hosts --job job.toml" in hosts, "of a sentence"
    (certified,) = (line for line in hosts if "cluster.authority" in line)
    assert parse(certified)["on"] == "ssh:hosts"
    for right, wrong in [("--on", "--upon"), ("run", "runn"), ("cluster.authority", "cluster.authorities")]:
        with pytest.raises((AssertionError, ConfigurationError), match=wrong):
            parse(certified.replace(right, wrong))

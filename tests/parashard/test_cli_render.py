"""parashard render: writes below a folder, and tells mistakes in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from parashard.cli import app
from parashard.errors import ConfigurationError

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "digits.toml"


def invoke(*arguments: str) -> str:
    ran = CliRunner().invoke(app, ["render", "k8s", str(EXAMPLE), *arguments], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_k8s_writes_kustomizes_folders_and_says_how_to_apply_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = invoke("--set", "cluster.workers=7")
    assert said == "k8s-digits: kubectl apply -k k8s-digits/base, or one of k8s-digits/overlays\n"
    assert "completions: 7" in (tmp_path / "k8s-digits/base/workers.yaml").read_text()
    assert sorted(path.name for path in (tmp_path / "k8s-digits").iterdir()) == ["base", "components", "overlays"]


def test_k8s_writes_again_over_what_it_wrote(tmp_path):
    for workers in (2, 3):
        invoke("--output", str(tmp_path), "--set", f"cluster.workers={workers}")
    assert "completions: 3" in (tmp_path / "base/workers.yaml").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "base").write_text("in the way")
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/base/.* cannot be written: "):
        invoke("--output", str(tmp_path))

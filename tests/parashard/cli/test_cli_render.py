"""parashard render: writes below a folder, and tells mistakes in one line."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.errors import ConfigurationError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits.toml"


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


@pytest.mark.parametrize("platform", ["k8s", "compose", "slurm"])
def test_an_empty_folder_is_not_the_current_one(tmp_path, monkeypatch, platform):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["render", platform, str(EXAMPLE), "--output", ""], catch_exceptions=False)
    assert (ran.exit_code, "found ''; allowed: a folder, such as " in ran.output) == (2, True)
    assert not list(tmp_path.iterdir())


def test_k8s_writes_again_over_what_it_wrote(tmp_path):
    for workers in (2, 3):
        invoke("--output", str(tmp_path), "--set", f"cluster.workers={workers}")
    assert "completions: 3" in (tmp_path / "base/workers.yaml").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "base").write_text("in the way")
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/base/.* cannot be written: "):
        invoke("--output", str(tmp_path))


def test_compose_writes_a_file_and_says_how_to_bring_it_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["render", "compose", str(EXAMPLE)], catch_exceptions=False)
    assert ran.output == "compose-digits: docker compose -f compose-digits/compose.yaml up --build\n"
    written = (tmp_path / "compose-digits/compose.yaml").read_text()
    job_folder = os.path.relpath(EXAMPLE.parent, tmp_path / "compose-digits")
    assert f":-{job_folder}}}:/job:ro\n" in written


def test_slurm_writes_a_script_and_says_how_to_submit_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["render", "slurm", str(EXAMPLE), "--set", "cluster.workers=7", "--worker-options", "--partition=spot"]
    ran = CliRunner().invoke(app, command, catch_exceptions=False)
    assert ran.output == (
        f"slurm-digits.sh: bash slurm-digits.sh up, where sbatch is; all nodes must see {tmp_path}/runs/digits-slurm\n"
    )
    script = tmp_path / "slurm-digits.sh"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "WORKERS=7" in lines
    assert f"RUN={tmp_path}/runs/digits-slurm" in lines
    assert any(line.startswith("WORKER_OPTIONS=(--partition=spot)") for line in lines)


def test_slurm_judges_a_range_of_ports_for_each_node_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["render", "slurm", str(EXAMPLE), "--set", "cluster.shards=64", "--set", "cluster.port=7000-7010"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert "PORTS=7000-7010 " in (tmp_path / "slurm-digits.sh").read_text()


@pytest.mark.parametrize("read", ["job.toml", "own.sh"])
def test_slurm_writes_over_no_file_that_it_reads(tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    texts = {"job.toml": EXAMPLE.read_text(), "own.sh": "exec mine @{run}\n"}
    for name, text in texts.items():
        Path(name).write_text(text)
    command = ["render", "slurm", "job.toml", "--template", "own.sh", "--output", str(tmp_path / read)]
    with pytest.raises(
        ConfigurationError, match=rf"flag --output: found .*{read}, which render reads; allowed: another"
    ):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert {name: Path(name).read_text() for name in texts} == texts


def test_without_cert_manager_it_says_what_to_run_first(tmp_path):
    said = invoke("--output", str(tmp_path), "--certificates", "secrets").splitlines()
    assert said[0] == f"{tmp_path}: first sh {tmp_path}/secrets.sh FOLDER, for the certificates"
    assert said[1].startswith(f"{tmp_path}: kubectl apply -k ")
    assert (tmp_path / "secrets.sh").read_text().startswith("#!/bin/sh\n")


def test_certificates_for_an_insecure_job_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cluster.insecure: found true, with --certificates cert-manager"):
        invoke("--output", str(tmp_path), "--set", "cluster.insecure=true", "--certificates", "cert-manager")
    assert not list(tmp_path.iterdir())


def test_an_image_without_the_one_for_gpus_is_told_so(tmp_path):
    hint = f"{tmp_path}: the overlays with GPUs have the image parashard-cuda:latest: --cuda-image sets it\n"
    output = ("--output", str(tmp_path))
    assert hint in invoke(*output, "--image", "reg/p:1")
    assert hint not in invoke(*output)
    assert hint not in invoke(*output, "--image", "reg/p:1", "--cuda-image", "reg/p-cuda:1")
    assert "newName: reg/p-cuda" in (tmp_path / "components/gpu/kustomization.yaml").read_text()


def test_k8s_removes_what_an_earlier_call_wrote_and_this_one_does_not(tmp_path):
    output = ("--output", str(tmp_path))

    def removed(*arguments: str) -> list[str]:
        said = [line for line in invoke(*output, *arguments).splitlines() if "removed" in line]
        return [line.removeprefix(f"{tmp_path}: removed ").partition(",")[0] for line in said]

    assert removed() == []
    assert removed("--certificates", "secrets") == ["base/certificates.yaml"]
    assert removed("--set", "checkpoint.url=s3://bucket/digits", "--certificates", "secrets") == ["base/store.yaml"]
    assert removed("--set", "cluster.insecure=true") == ["secrets.sh"]
    assert not (tmp_path / "secrets.sh").exists()
    assert not (tmp_path / "base/certificates.yaml").exists()


def test_k8s_removes_nothing_that_it_did_not_write(tmp_path):
    others = {
        "secrets.sh": "#!/bin/sh\necho mine\n",
        "base/certificates.yaml": "",
        "base/mine.yaml": "kind: Secret\n",
        "overlays/mine/kustomization.yaml": "resources: [../../base]\n",
    }
    for name, text in others.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    said = invoke("--output", str(tmp_path), "--set", "cluster.insecure=true")
    assert "removed" not in said
    assert {name: (tmp_path / name).read_text() for name in others} == others


def test_more_ports_of_the_api_server_reach_the_manifests(tmp_path):
    invoke("--output", str(tmp_path), "--api-port", "16443", "--api-port", "8443")
    written = (tmp_path / "base/network.yaml").read_text()
    assert all(f"port: {port}}}" in written for port in (443, 6443, 8443, 16443))


def test_the_flags_of_an_object_store_reach_the_manifests(tmp_path):
    store = ("--set", "checkpoint.url=s3://bucket/digits", "--store-secret", "digits-s3", "--store-port", "9000")
    invoke("--output", str(tmp_path), *store)
    assert 'secretRef: {name: "digits-s3"}' in (tmp_path / "base/shards.yaml").read_text()
    assert "port: 9000" in (tmp_path / "base/network.yaml").read_text()

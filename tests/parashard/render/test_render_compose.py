"""render compose: which of a job's values end in which line, and which jobs containers cannot run."""

import re
from pathlib import Path

import pytest
import yaml

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import load_job
from parashard.render.compose import render_compose, source_tree
from support.small_job import SMALL_JOB

JOB = f"""{SMALL_JOB}
[cluster]
shards = 3
workers = 4
grace_s = 20.5
"""
CSV = {"source": "csv", "label": "y"}


@pytest.fixture
def render(tmp_path):
    """Return a function that renders the job with some keys set, into a folder beside the job's."""
    job = tmp_path / "jobs" / "job.toml"
    job.parent.mkdir()
    job.write_text(JOB)

    def rendered(*sets: str, **options: object) -> str:
        loaded = load_job(job, [parse_set(text) for text in sets], environ={})
        return render_compose(loaded, tmp_path / "compose", sets=sets, **options)

    return rendered


def services(text: str) -> dict:
    return yaml.safe_load(text)["services"]


def test_there_is_a_service_for_each_shard_and_one_for_all_workers(render):
    found = services(render())
    assert [name for name in found if name.startswith("shard")] == ["shard-0", "shard-1", "shard-2"]
    assert "--index=2" in found["shard-2"]["command"]
    assert found["worker"]["deploy"]["replicas"] == "${PARASHARD_WORKERS:-4}"
    assert "--set=cluster.shards=3" in found["coordinator"]["command"]


def test_a_container_has_the_time_that_the_job_gives_to_the_one_that_leaves(render):
    assert {found["stop_grace_period"] for name, found in services(render()).items()} == {"26s"}


def test_paths_are_seen_from_the_compose_file_and_a_job_is_named_in_its_folder(render, tmp_path):
    found = services(render(source=tmp_path / "tree"))
    assert found["worker"]["volumes"][0] == "${PARASHARD_JOB_FOLDER:-../jobs}:/job:ro"
    assert "--job=/job/${PARASHARD_JOB:-job.toml}" in found["coordinator"]["command"]
    assert found["worker"]["build"]["context"] == "../tree"
    assert found["gpu-worker"]["build"]["target"] == "cuda"
    assert found["prometheus"]["volumes"][0].startswith("../tree/deploy/prometheus:")


def test_each_service_has_a_certificate_of_its_own_and_the_coordinators_container_an_operators_too(render):
    text = render()
    found = services(text)
    issued = {volume for volume in found["certificates"]["volumes"] if volume.startswith("tls-")}
    assert issued == {
        f"tls-{name}:/tls/{name}" for name in ("coordinator", "operator", "worker", "shard-0", "shard-1", "shard-2")
    }
    for name in ("coordinator", "worker", "gpu-worker", "shard-1"):
        assert "--tls-dir=/tls" in found[name]["command"]
        assert f"tls-{name.removeprefix('gpu-')}:/tls:ro" in found[name]["volumes"]
    assert "tls-operator:/operator:ro" in found["coordinator"]["volumes"]
    assert "--insecure" not in text
    assert set(yaml.safe_load(text)["volumes"]) >= {volume.partition(":")[0] for volume in issued}


def test_a_job_that_says_insecure_has_no_certificates(render):
    text = render("cluster.insecure=true")
    found = services(text)
    assert "certificates" not in found
    assert "depends_on" not in found["coordinator"]
    for name in ("coordinator", "worker", "shard-0"):
        assert "--insecure" in found[name]["command"]
    assert "tls" not in text.lower()


def test_what_is_set_is_set_for_the_coordinator_and_dollars_are_not_the_engines(render):
    command = services(render("job.seed=7", "cluster.shards=2", 'checkpoint.url="s3://$a"'))["coordinator"]["command"]
    assert [word for word in command if word.startswith("--set=")] == [
        "--set=job.seed=7",
        '--set=checkpoint.url="s3://$$a"',
        "--set=cluster.launcher=external",
        "--set=cluster.shards=2",
        "--set=cluster.workers=${PARASHARD_WORKERS:-4}",
    ]


STORE_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)


@pytest.mark.parametrize(("insecure", "own"), [("false", {"PARASHARD_TLS_DIR": "/operator"}), ("true", {})])
def test_an_object_stores_credentials_are_passed_on_to_those_that_use_it(render, insecure, own):
    found = services(render("checkpoint.url=s3://bucket/digits", f"cluster.insecure={insecure}"))
    passed_on = dict.fromkeys(STORE_VARIABLES)  # without a value: the one that `up` has
    assert found["coordinator"].pop("environment") == passed_on | own
    for index in range(3):
        assert found[f"shard-{index}"].pop("environment") == passed_on
    assert not [name for name, service in found.items() if "environment" in service]


def test_without_an_object_store_nothing_of_it_is_in_the_file(render):
    assert "AWS_" not in render()
    assert "environment" not in services(render())["shard-0"]


def test_without_a_source_tree_nothing_is_built_and_nothing_watched(render):
    found = services(render())
    assert not {"prometheus", "grafana"} & set(found)
    assert "build" not in found["worker"]


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (["cluster.shards=33"], r"cluster.shards: found 33; allowed in a compose file: 1 to 32"),
        (
            ['data={source="csv", label="y", path="/else/where.csv"}'],
            r"data.path: found /else/where.csv, which the containers do not have; allowed .* in the job file's folder",
        ),
    ],
)
def test_what_containers_cannot_run_is_refused_with_the_key(render, sets, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        render(*sets)


def test_vocabularies_are_data(render, tmp_path):
    table = f'data={{source="csv", label="y", path="{tmp_path}/jobs/a.csv", vocabularies={{"a.b"="PATH"}}}}'
    assert render(table.replace("PATH", f"{tmp_path}/jobs/b.txt"))
    with pytest.raises(ConfigurationError, match=r'data\.vocabularies\."a\.b": found /b\.txt, which the containers do'):
        render(table.replace("PATH", "/b.txt"))


@pytest.mark.parametrize("name", ["my job #1.toml", "a:b.toml", "${HOME}.toml", 'a".toml'])
def test_a_job_file_that_a_compose_file_cannot_name_is_refused(tmp_path, name):
    (tmp_path / name).write_text(JOB)
    with pytest.raises(ConfigurationError, match="a compose file cannot name it; allowed: letters"):
        render_compose(load_job(tmp_path / name, environ={}), tmp_path)


def test_an_image_that_is_none_is_refused_with_the_flag(render):
    with pytest.raises(ConfigurationError, match=re.escape("flag --cuda-image: found 'UPPER'; allowed: NAME")):
        render(cuda_image="UPPER")


def test_the_source_tree_is_found_where_there_is_one():
    assert source_tree() == Path(__file__).resolve().parents[3]


def test_the_committed_compose_file_is_what_is_rendered_for_the_example():
    root = source_tree()
    sets = ["cluster.workers=3"]
    loaded = load_job(root / "examples/digits.toml", [parse_set(text) for text in sets], environ={})
    rendered = render_compose(loaded, root / "deploy/compose", source=root, sets=sets)
    assert rendered == (root / "deploy/compose/compose.yaml").read_text(), (
        "parashard render compose examples/digits.toml --set cluster.workers=3 --output deploy/compose"
    )

"""What no platform can run in containers of our images: refused with the key, by each of them in the same words."""

import re
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import LoadedJob, load_job
from parashard.render.common import SOURCES_MISSING, STORE_SCHEMES, filled, parsed_image, template, templates
from parashard.render.compose import render_compose
from parashard.render.kubernetes import cluster_overrides
from parashard.store import CREATE_IS_CONDITIONAL
from support.small_job import SMALL_JOB

LOCK = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "requirements.lock"
PARQUET = 'data={source="parquet", path="examples.parquet", label="y"}'


def for_kubernetes(loaded: LoadedJob) -> None:
    cluster_overrides(loaded)


def for_compose(loaded: LoadedJob) -> None:
    render_compose(loaded, loaded.path.parent)


PLATFORMS = {"on Kubernetes": for_kubernetes, "in a compose file": for_compose}


def load(folder: Path, *sets: str) -> LoadedJob:
    job = folder / "job.toml"
    job.write_text(SMALL_JOB)
    return load_job(job, [parse_set(text) for text in sets], environ={})


@pytest.mark.parametrize("where", PLATFORMS)
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("checkpoint.url=/somewhere", "checkpoint.url: found /somewhere, a folder of this machine"),
        ("checkpoint.url=file:///tmp/x", "checkpoint.url: found file:///tmp/x, which each container has for itself"),
        ("checkpoint.url=memory://x", "checkpoint.url: found memory://x, which each container has for itself"),
        ("checkpoint.url=ftp://host/x", "checkpoint.url: found ftp://host/x, which is no store"),
        ("cluster.shard_device=cuda", "cluster.shard_device: found cuda, and shards have no GPU"),
        ("cluster.shard_device=cuda:1", "cluster.shard_device: found cuda:1, and shards have no GPU"),
        (PARQUET, "data.source: found parquet, which needs pyarrow, and the images do not have it"),
    ],
)
def test_what_containers_cannot_run_is_refused_everywhere(tmp_path, where, text, found):
    with pytest.raises(ConfigurationError, match=f"^flag --set: {re.escape(found)}; allowed {where}: "):
        PLATFORMS[where](load(tmp_path, text))


@pytest.mark.parametrize("where", PLATFORMS)
@pytest.mark.parametrize("sets", [(), *((f"checkpoint.url={scheme}://bucket/x",) for scheme in STORE_SCHEMES)])
def test_what_they_can_run_is_not(tmp_path, where, sets):
    PLATFORMS[where](load(tmp_path, *sets))


def test_what_is_refused_for_want_of_a_package_is_what_the_images_do_not_have():
    packages = set(re.findall(r"^([\w-]+)==", LOCK.read_text(), re.MULTILINE))
    assert not packages & set(SOURCES_MISSING.values())
    assert "obstore" in packages
    assert set(STORE_SCHEMES) == {*CREATE_IS_CONDITIONAL} - {"memory"}


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("reference", "name", "tag", "digest"),
    [
        ("parashard", "parashard", None, None),
        ("foo:bar", "foo", "bar", None),
        ("team/foo_bar:0.1.0-rc.1", "team/foo_bar", "0.1.0-rc.1", None),
        ("registry.example.org:5000/ml/foo", "registry.example.org:5000/ml/foo", None, None),
        ("localhost:5000/foo:bar", "localhost:5000/foo", "bar", None),
        (f"foo@{DIGEST}", "foo", None, DIGEST),
        (f"reg:1/foo:bar@{DIGEST}", "reg:1/foo", "bar", DIGEST),
    ],
)
def test_a_reference_has_a_name_and_may_have_a_tag_and_a_digest(reference, name, tag, digest):
    assert parsed_image("--image", reference).groupdict() == {"name": name, "tag": tag, "digest": digest}


@pytest.mark.parametrize(
    "reference",
    ["foo:bar:baz", "foo:bar/baz", "foo/bar:80/baz", "foo//bar", "/foo", "foo/", "foo:", "", "UPPER", "foo@sha256:0"],
)
def test_what_is_no_reference_is_refused(reference):
    with pytest.raises(ConfigurationError, match=f"^flag --image: found {reference!r}; allowed: NAME, NAME:TAG or"):
        parsed_image("--image", reference)


def test_a_value_inside_a_line_is_put_there():
    assert filled("name: @{name}-shard # of @{name}", {"name": "digits"}) == "name: digits-shard # of digits\n"


def test_lines_take_the_indentation_of_their_place():
    assert (
        filled("spec:\n  @{pod}\nend:", {"pod": "a: 1\n  b: 2\n\nc: 3\n"})
        == "spec:\n  a: 1\n    b: 2\n\n  c: 3\nend:\n"
    )


def test_an_empty_value_takes_its_line_with_it():
    assert filled("a: 1\n  @{extra}\nb: 2", {"extra": ""}) == "a: 1\nb: 2\n"


def test_values_name_others():
    assert filled("@{pod}", {"pod": "- @{part}", "part": "x"}) == "- x\n"


def test_what_kubernetes_fills_in_is_left_alone():
    assert filled("--host=$(POD_IP)", {}) == "--host=$(POD_IP)\n"


def test_a_place_without_a_value_is_a_mistake_of_ours():
    with pytest.raises(KeyError, match="nowhere"):
        filled("a: @{nowhere}", {})


def test_a_folders_templates_are_found_in_the_installed_package():
    found = templates("components")
    assert "components/gpu/worker.yaml" in found
    assert found == sorted(found)
    assert "nvidia.com/gpu" in template("patches/gpu_worker.yaml")

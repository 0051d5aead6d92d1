"""Templates: a value in a line goes in as it is, one alone on its line goes in at that line's indentation."""

import pytest

from parashard.render.common import filled, template, templates


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

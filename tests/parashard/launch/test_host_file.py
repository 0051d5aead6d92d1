"""Host files: a host a line, and what is wrong in which."""

from __future__ import annotations

import sys

import pytest

from parashard.errors import ConfigurationError
from parashard.launch.host_file import NamedHost, hosts_in


def test_hosts_of_a_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nuser@node1\nnode2 python=/opt/bin/python  # the big one\n\n")
    assert hosts_in(file) == [NamedHost("user@node1", sys.executable), NamedHost("node2", "/opt/bin/python")]


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=x",
        "node1 node2",
        "node1 python=",
        "node1 python=a b",
        "node1\nnode1",
        "no\0de",
        "node1 python=/\0",
        "node\x1b[2J",
        "\u200bnode1",
    ],
)
def test_a_line_that_is_no_host_is_refused(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(line)
    with pytest.raises(
        ConfigurationError, match=rf"host file {file}, line \d: found .*; allowed: NAME or NAME python="
    ):
        hosts_in(file)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    (tmp_path / "hosts").write_text("node1\n", encoding="utf-8-sig")
    assert hosts_in(tmp_path / "hosts") == [NamedHost("node1", sys.executable)]


def test_a_home_folder_is_written_without_the_tilde_that_no_shell_expands(tmp_path):
    (tmp_path / "hosts").write_text("node1 python=~/venv/bin/python\n")
    with pytest.raises(
        ConfigurationError, match=r"line 1: found python=~/venv/bin/python, .* such as python=venv/bin/python$"
    ):
        hosts_in(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("text", "why"), [("", "names 0 hosts; allowed: 1 to"), (None, "No such file"), (b"\xff", "not text")]
)
def test_a_file_without_hosts_is_refused(tmp_path, text, why):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=why):
        hosts_in(file)

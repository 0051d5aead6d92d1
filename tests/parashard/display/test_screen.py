"""The live view at every size of terminal: no line wraps, and neither workers nor shards hide each other."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.display.screen import EVENTS_SHOWN, StatusScreen, plain_line, screen_lines
from support.status_cases import crowd_of, shard_of, status_of, worker_of

WIDTHS = (80, 120, 200)
CROWDS = {"2 workers": (2, 2), "12 workers": (12, 2), "50 workers": (50, 4), "50 workers, 50 shards": (50, 50)}
LONG = "worker-0 failed at step 12: RuntimeError: " + "what a user's model says may be long " * 20
BUSY = {
    "held_out": {"accuracy": 0.97, "loss": 0.0123, "mean_squared_error": 353.1234},
    "problems": ["shard-1: checkpoint failed: no space left on device", f"shard-0: {LONG}"],
    "events": [*(f"event {i}" for i in range(20)), LONG],
}


def lines_of(status: pb.GetStatusReply, width: int, height: int | None = None) -> list[str]:
    return [line.plain for line in screen_lines(status, width, height)]


def rows_of(lines: list[str], role: str) -> list[str]:
    """Return the names of the workers or shards that have a row, from top to bottom."""
    return [found[1] for line in lines if (found := re.match(rf"({role}-\d+)  ", line))]


@pytest.mark.parametrize("width", [*WIDTHS, 20, 40, 1])
@pytest.mark.parametrize("height", [24, 50, 10, 4, None])
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_no_line_is_longer_than_the_terminal_is_wide_and_not_more_are_there_than_it_is_high(width, height, crowd):
    lines = lines_of(crowd_of(*crowd, **BUSY), width, height)
    assert max(map(cell_len, lines)) <= width
    assert height is None or len(lines) <= height


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_what_rich_prints_are_these_lines(width, crowd):
    status, out = crowd_of(*crowd, **BUSY), io.StringIO()
    console = Console(file=out, width=width, height=24, force_terminal=True, color_system=None, highlight=False)
    console.print(StatusScreen(status, fits_height=True))
    assert out.getvalue().splitlines() == lines_of(status, width, 23), "nothing wrapped, the cursor's line is free"


@pytest.mark.parametrize("width", WIDTHS)
def test_fifty_workers_hide_no_shard(width):
    lines = lines_of(crowd_of(50, 4), width, 23)
    assert rows_of(lines, "shard") == [f"shard-{i}" for i in range(4)]
    shown = rows_of(lines, "worker")
    assert len(shown) >= 8
    assert f"{50 - len(shown)} more workers: {50 - len(shown)} up, 0 down" in lines
    assert shown == [f"worker-{i}" for i in range(len(shown))]


def test_fifty_shards_hide_no_worker():
    lines = lines_of(crowd_of(2, 50), 80, 23)
    assert rows_of(lines, "worker") == ["worker-0", "worker-1"]
    assert len(rows_of(lines, "shard")) >= 8
    assert any("more shards" in line for line in lines)


def test_of_many_those_that_are_down_are_shown_first_in_their_order():
    lines = lines_of(crowd_of(50, 2, down=frozenset({20, 41})), 80, 23)
    shown = rows_of(lines, "worker")
    assert shown[-2:] == ["worker-20", "worker-41"]
    assert shown[:-2] == [f"worker-{i}" for i in range(len(shown) - 2)]
    assert any(line.endswith("up, 0 down") for line in lines)


def test_workers_that_were_scaled_away_do_not_push_others_off_the_screen():
    status = crowd_of(50, 2, down=frozenset(range(10, 50)))
    status.workers_wanted = 10
    assert rows_of(lines_of(status, 80, 23), "worker")[:10] == [f"worker-{i}" for i in range(10)]


def test_all_of_twelve_workers_fit_a_terminal_of_24_lines():
    lines = lines_of(crowd_of(12, 2, held_out={"accuracy": 0.97, "loss": 0.1}, events=["a", "b", "c"]), 80, 23)
    assert len(rows_of(lines, "worker")) == 12
    assert lines[-2:] == ["b", "c"], "the latest events"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_figures_are_there_at_every_width(width):
    text = "\n".join(lines_of(status_of(held_out={"accuracy": 0.97, "mean_squared_error": 353.1234}), width, 23))
    for part in (
        "digits   running   ssp:8   http://127.0.0.1:9/",
        "250 of 1,000 steps (25 %)  10 s, about 30 s left",
        "throughput 12,346 examples/s",
        "training loss 0.1235",
        "held-out accuracy 0.9700",
        "held-out mean squared error 353.1234",
        "staleness p50 1, p95 3, max 7 pushes",
        "step lag max 4",
        "transfers take 50 % of a step, 50 % of that while computing",
        "traffic saved 60 %",
        "worker-1 ended: killed by SIGKILL",
    ):
        assert part in text, part


def test_columns_go_whole_where_there_is_no_room_and_numbers_are_never_cut():
    wide, narrow = (lines_of(crowd_of(2, 2), width) for width in (200, 60))
    titles = next(line for line in wide if line.startswith("worker ")).split()
    assert " ".join(titles) == "worker device examples/s steps leased restarts lease % compute % transfer %"
    titles = next(line for line in narrow if line.startswith("worker ")).split()
    assert " ".join(titles) == "worker device examples/s steps transfer %"
    row = next(line for line in narrow if line.startswith("worker-0")).split()
    assert row[-3:] == ["12,346", "12,345", "50"]


def test_an_event_that_tells_of_a_problem_in_view_is_left_out():
    problems = ["shard-1 does not answer", *(f"problem {i}" for i in range(5))]
    lines = lines_of(status_of(problems=problems, events=[f"warning: {problem}" for problem in problems]), 80, 40)
    assert [line for line in lines if "shard-1 does" in line] == ["! shard-1 does not answer"]
    assert [line for line in lines if "problem 4" in line] == ["warning: problem 4"], "it is not among those in full"


def test_who_is_down_is_marked():
    lines = lines_of(status_of(), 80, 23)
    assert next(line for line in lines if line.startswith("worker-0")).split()[1] == "cpu"
    assert next(line for line in lines if line.startswith("worker-1")).split()[1] == "down"
    assert next(line for line in lines if line.startswith("shard-0")).split()[1] == "12,345"
    assert next(line for line in lines if line.startswith("shard-1")).split()[1] == "down"


def test_what_is_wrong_now_stands_above_the_tables():
    lines = lines_of(status_of(problems=["shard-1: checkpoint failed: no space left on device"]), 80, 23)
    problem = lines.index("! shard-1: checkpoint failed: no space left on device")
    assert problem < next(i for i, line in enumerate(lines) if line.startswith("worker "))
    lines = lines_of(status_of(problems=[f"problem {i}" for i in range(9)]), 80, 23)
    assert [line for line in lines if line.startswith("!")] == [
        "! problem 0",
        "! problem 1",
        "! 7 more problems, see the status page",
    ]


def test_a_job_that_does_not_run_says_why():
    waiting = status_of(state=pb.JOB_STATE_STARTING, reason="waiting for the shards")
    assert lines_of(waiting, 80)[1] == "waiting for the shards"
    assert "waiting for the shards" not in lines_of(status_of(reason="waiting for the shards"), 80)


def test_the_latest_events_are_shown_each_from_its_beginning():
    lines = lines_of(status_of(events=[f"event {i}." for i in range(20)]), 80, 50)
    assert lines[-EVENTS_SHOWN:] == [f"event {i}." for i in range(20 - EVENTS_SHOWN, 20)]
    assert lines_of(crowd_of(50, 4, events=["earlier", LONG]), 80, 23)[-2].startswith("worker-0 failed at step 12")


@pytest.mark.parametrize(
    "status",
    [
        pb.GetStatusReply(),
        status_of(steps_complete=0, elapsed_s=0.0, training_loss=0.0, held_out={}, workers=[], shards=[], events=[]),
        status_of(steps_total=0, steps_complete=0),
        status_of(state=pb.JOB_STATE_FAILED, training_loss=float("nan"), examples_per_s=float("inf")),
        status_of(steps_complete=2000),
        status_of(
            job="\u96c6" * 60,
            workers=[worker_of(0, device="\u96c6" * 90)],
            shards=[shard_of(0)],
            events=["\u96c6" * 90],
        ),
    ],
    ids=["nothing", "before the first step", "no steps", "failed", "more than all", "wide characters"],
)
@pytest.mark.parametrize("width", [160, 80, 20])
def test_every_status_can_be_shown(status, width):
    assert max(map(cell_len, lines_of(status, width, 23))) <= width
    assert plain_line(status).startswith("step ")


def test_a_terminal_without_unicode_gets_a_bar_of_ascii():
    bar = screen_lines(status_of(), 80, ascii_only=True)[1].plain
    assert bar.startswith("#######---")
    assert bar.isascii()


@pytest.mark.parametrize("name", ["[/]", "[bold]", "[/red]", "[link=x", "worker[0]", ":smile:"])
def test_names_of_others_are_text_and_no_markup(name):
    worker = pb.WorkerStatus(name=name, live=True, device=f"cuda:0 {name}")
    status, out = status_of(job=name, workers=[worker], held_out={name: 0.5}, events=[name]), io.StringIO()
    Console(file=out, width=160).print(StatusScreen(status, fits_height=False))
    assert out.getvalue().count(name) == 5


def test_one_line_has_the_figures():
    assert plain_line(status_of()) == (
        "step 250 of 1,000 (25 %)  throughput 12,346 examples/s  training loss 0.1235  held-out accuracy 0.9700  "
        "staleness p50 1, max 7 pushes  1 of 2 workers up"
    )


@pytest.mark.parametrize(
    ("live", "wanted", "told"),
    [(1, 1, "1 worker up"), (0, 1, "0 of 1 worker up"), (2, 2, "2 workers up"), (2, 1, "2 workers up")],
)
def test_one_worker_is_one_worker(live, wanted, told):
    status = status_of(workers=[worker_of(i) for i in range(live)], workers_wanted=wanted)
    assert plain_line(status).endswith(f"  {told}")


def with_tables(**changed: int) -> pb.GetStatusReply:
    total = {"table": "user", "rows": 1500, "rows_max": 4000, "memory_bytes": 3 << 20, "candidates": 7} | changed
    hottest = [shard_pb2.HotKey(key=key, pushes=2000 - key) for key in range(5)]
    user = pb.TableStatus(total=shard_pb2.TableFigures(**total, hottest_keys=hottest), fullest=0.75)
    item = pb.TableStatus(total=shard_pb2.TableFigures(table="item", pulled_keys=8, pulled_rows=2))
    status = status_of()
    status.tables.extend([user, item])
    return status


def test_embedding_tables_have_a_table_of_their_own_and_jobs_without_any_none() -> None:
    lines = lines_of(with_tables(), 160)
    at = next(number for number, line in enumerate(lines) if line.startswith("table "))
    titles, user, item = (re.split(r" {2,}", line.strip()) for line in lines[at : at + 3])
    assert dict(zip(titles, user, strict=True)) == {
        "table": "user",
        "rows": "1,500",
        "fullest shard": "75 %",
        "memory MiB": "3.0",
        "keys found": "-",
        "keys waiting": "7",
        "added since start": "0",
        "evicted since start": "0",
        "pushed most (times)": "0 (2,000), 1 (1,999), 2 (1,998)",
    }
    assert dict(zip(titles, item, strict=True))["keys found"] == "25 %"
    assert not any(line.startswith("table ") for line in lines_of(status_of(), 160))


@pytest.mark.parametrize("height", range(1, 40))
def test_embedding_tables_leave_a_screen_its_height(height: int) -> None:
    assert len(lines_of(with_tables(), 100, height)) <= height

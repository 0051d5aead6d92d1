"""Script kills: a PyTorch script whose weights and state count, with workers killed again and again.

`python tests/chaos/script_kills.py --kills 20 --write` kills a worker every four seconds, or twice as long as the last
one took to come back, then a shard, then the coordinator; under `async` and `sync:4`. It prints a line for each and
writes benchmarks/results/chaos_script_kills.json. The ledger must have every example once an epoch, the counters every
step, the shards' final manifests every step, and in `sync:4` the weights the digest of a run without faults. It needs
PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from figures import say, write_figures

from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from support.cluster_run import eventually
from support.report_oracle import store_of, unsaved
from support.script_run import ScriptRun
from support.torch_ledger import EXAMPLES, STEPS_AN_EPOCH, TORCH_LEDGER

EVERY_S = 4.0
EPOCHS = 600
FIGURES = "chaos_script_kills"


def live_workers(run: ScriptRun) -> dict[str, int]:
    """Return the restarts of the workers that the coordinator hears, by name."""
    if "coordinator" not in run.processes():
        return {}
    where = str(run.runs()[-1])
    client = CoordinatorClient(find_coordinator(where), where=where)
    try:
        return {worker.name: worker.restarts for worker in client.get_status().workers if worker.live}
    finally:
        client.close()


def killed(run: ScriptRun, kills: int) -> list[float]:
    """Kill one worker after the other; return how long each took to be back, in seconds."""
    back_s: list[float] = []
    for number in range(kills):
        name = f"worker-{number % 2}"
        eventually(lambda name=name: name in live_workers(run), f"{name} is live", told=run.complaint)
        began_s = time.monotonic()
        before = run.processes()[name]
        run.kill(name)
        eventually(
            lambda name=name, before=before: run.processes().get(name, before) != before and name in live_workers(run),
            f"{name} is back",
            told=run.complaint,
        )
        back_s.append(time.monotonic() - began_s)
        pause_s = max(EVERY_S, 2 * back_s[-1]) - back_s[-1]
        say(f"  {name} was back after {back_s[-1]:.1f} s ({number + 1} of {kills})")
        time.sleep(pause_s)  # the interval is what is asked for
    return back_s


def outcome(run: ScriptRun, epochs: int, quiet_sha256: str) -> tuple[dict[str, Any], list[str]]:
    """Wait for a script; return what it printed, and which promises it broke."""
    code = run.wait()
    if code != 0:
        return {}, [f"the script ended with {code}: {run.complaint()[-2000:]}"]
    found = json.loads(run.output().splitlines()[-1])
    due = {
        "counts": [float(epochs)] * 2,
        "steps": epochs * STEPS_AN_EPOCH,
        "tracked": epochs * STEPS_AN_EPOCH,
        "examples": epochs * EXAMPLES,
    }
    broken = [f"{name} is {found[name]}, due is {value}" for name, value in due.items() if found[name] != value]
    if not found["variance"] > 0:
        broken.append(f"the variance is {found['variance']}")
    if quiet_sha256 and found["sha256"] != quiet_sha256:
        broken.append("the weights are not those of the quiet run")
    folder = run.runs()[-1]
    return found, broken + unsaved(store_of(folder), json.loads((folder / "report.json").read_text()))


def run_one(consistency: str, kills: int, epochs: int) -> dict[str, Any]:
    """Return what a run under kills showed."""
    with tempfile.TemporaryDirectory() as folder:
        quiet, noisy = Path(folder, "quiet"), Path(folder, "noisy")
        quiet.mkdir()
        noisy.mkdir()
        sha256 = ""
        if consistency != "async":
            run = ScriptRun(quiet, TORCH_LEDGER, str(epochs), consistency)
            try:
                found, broken = outcome(run, epochs, "")
            finally:
                run.clean_up()
            if broken:
                return {"consistency": consistency, "broken": broken}
            sha256 = found["sha256"]
        (noisy / "slow").touch()
        run = ScriptRun(noisy, TORCH_LEDGER, str(epochs), consistency)
        try:
            back_s = killed(run, kills)
            for name in ("shard-1", "coordinator"):
                before = run.processes()[name]
                run.kill(name)
                back = partial(lambda name, before: run.processes().get(name, before) != before, name, before)
                eventually(back, f"{name} is back", told=run.complaint)
                time.sleep(EVERY_S)
            if run.process.poll() is not None:
                return {"consistency": consistency, "broken": ["the job was over before the kills were"]}
            (noisy / "slow").unlink()
            found, broken = outcome(run, epochs, sha256)
        finally:
            run.clean_up()
    return {"consistency": consistency, "worker_kills": kills, "back_s": back_s, "found": found, "broken": broken}


def main() -> int:
    """Run both policies; return how many broke a promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = []
    for consistency in ("async", "sync:4"):
        shown = run_one(consistency, options.kills, options.epochs)
        figures.append(shown)
        say(f"{consistency}: {'; '.join(shown['broken']) or 'every promise kept'}")
    if options.write:
        write_figures(FIGURES, {"runs": figures})
    return sum(bool(shown["broken"]) for shown in figures)


if __name__ == "__main__":
    sys.exit(main())

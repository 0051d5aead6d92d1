"""The panels of pods' ends and of refused peers against what the code exports: a local run has only zeros there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from deploy.grafana.contents import FAILURES
from parashard.telemetry.http import Metrics
from parashard_coordinator.core.calls import CoreSettings
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.policies import Async
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.supervision import REASONS, ROLES, Pod, PodEnd
from parashard_coordinator.endpoints.status import StatusView, coordinator_families
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.prometheus_server import expressions_show, named, needs_promtool

ENDS = {("worker", "preempted"): 3, ("worker", "failed"): 1, ("shard", "unseen"): 2}
REFUSED = {"calls": 7, "slow": 0}
SHOWN: dict[str, list[tuple[dict[str, str], float]]] = {
    "Ends of pods": [
        ({"role": role, "reason": reason}, ENDS.get((role, reason), 0)) for role in ROLES for reason in REASONS
    ],
    "Refused peers": [({"reason": reason}, count) for reason, count in REFUSED.items()],
}
"""Of each panel: what it shows of each series."""


def exported() -> Iterator[tuple[str, str]]:
    """Yield every counter of a coordinator that saw these ends, from before them on."""
    options = CoreSettings(run_id="run", job_digest="d", steps_total=1, shards=1, workers=1)
    core = Core(JobRecord(options, Async(), Evaluations([], Async(), 1), None, Rounds()))
    for (role, reason), count in ENDS.items():
        for number in range(count):
            core.pod_ended(PodEnd(Pod(f"uid-{number}", f"digits-{role}-{number}", role, "Failed"), reason, None))
    metrics = Metrics("coordinator", refused={reason: partial(REFUSED.__getitem__, reason) for reason in REFUSED})
    metrics.add(partial(coordinator_families, ExclusiveCore(core), StatusView("job", "async")))
    for family in metrics.collect():
        for sample in family.samples:
            if family.type == "counter":
                yield named(sample.name, {**sample.labels, "run": "digits"}), f"0x6 {sample.value:g}x8"


@needs_promtool
def test_the_panels_show_the_last_5_minutes_by_the_labels_that_the_coordinator_exports(tmp_path: Path) -> None:
    expected = []
    for title, shown in SHOWN.items():
        (query,) = next(panel for panel in FAILURES.panels if panel.title == title).queries
        assert query.legend == " ".join(f"{{{{{label}}}}}" for label in shown[0][0])
        expected.append((query.expr.replace("$run", "digits"), shown))
    expressions_show(tmp_path, exported(), expected)

"""The worker's metrics: families that Prometheus can read, with the loop's numbers in them."""

from __future__ import annotations

from parashard_worker.worker import worker_families
from support.loop_cases import Job
from support.shown_metrics import shown_families


def test_the_loops_counters_are_reported() -> None:
    session = Job(*range(3)).run().loop.session
    session.phases_s.update(pull=1.5)
    session.transfers.transfer_s = 2.5
    session.transfers.staleness_pushes = 5
    session.computed = 4
    families = shown_families(worker_families(session, "worker-7"))
    samples = {(s.name, s.labels.get("phase")): s for family in families for s in family.samples}
    assert all(family.type == "counter" and family.documentation for family in families)
    assert {s.labels["worker"] for s in samples.values()} == {"worker-7"}
    assert samples["parashard_worker_steps_total", None].value == 3
    assert samples["parashard_worker_examples_total", None].value == 12
    assert samples["parashard_worker_phase_seconds_total", "pull"].value == 1.5
    assert samples["parashard_worker_transfer_seconds_total", None].value == 2.5
    assert samples["parashard_worker_computed_steps_total", None].value == 4
    assert samples["parashard_worker_staleness_pushes_total", None].value == 5
    phases = {phase for _, phase in samples if phase}
    assert phases == {"lease", "pull", "compute", "push"}

"""Runs many seeds: `python tests/simulation --seeds 10000`. Prints what failed; exits 1 if anything did.

With `--off RULE` a rule is off, and the seeds whose oracle sees it are what one looks for.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from parashard.process.logs import log

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # `parashard`, before the folder of its tests
sys.path.insert(2, str(Path(__file__).absolute().parents[1]))  # what all tests share

from broken_rules import BROKEN_RULES
from sim_parts import REAL, Parts
from sim_run import simulate
from sim_settings import JOBS, Setting, drawn_setting

FRESH_FROM, FRESH_UNTIL = 10**6, 10**12


def main() -> int:
    """Run and return the exit code."""
    parser = argparse.ArgumentParser(description="Simulates jobs under faults, seed by seed.")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds of each job")
    parser.add_argument("--first", type=int, help="the first seed (default: fresh seeds)")
    parser.add_argument("--job", default="", metavar="ORACLE/POLICY", help="run only this job, such as torn/async")
    parser.add_argument(
        "--no-environment", dest="environment", action="store_false", help="let no store fail and no process hang"
    )
    parser.add_argument("--off", choices=sorted(BROKEN_RULES), help="switch a rule off")
    arguments = parser.parse_args()
    log.setLevel(logging.CRITICAL)
    first = random.SystemRandom().randrange(FRESH_FROM, FRESH_UNTIL) if arguments.first is None else arguments.first
    seeds = range(first, first + arguments.seeds)
    _say(f"seeds {seeds.start} to {seeds.stop - 1}")
    if arguments.off:
        broken = BROKEN_RULES[arguments.off]
        return int(bool(_failures(arguments.off, seeds, broken.setting, broken.parts)))
    jobs = [job for job in JOBS if arguments.job in ("", "/".join(job))]
    if not jobs:
        parser.error(f"--job is one of {', '.join('/'.join(job) for job in JOBS)}")
    settings = {
        f"{oracle}/{policy}": partial(drawn_setting, oracle=oracle, policy=policy, environment=arguments.environment)
        for oracle, policy in jobs
    }
    return int(any([_failures(name, seeds, setting, REAL) for name, setting in settings.items()]))


def _failures(name: str, seeds: Iterable[int], setting: Callable[[int], Setting], parts: Parts) -> int:
    failed, runs, fired = 0, 0, Counter[str]()
    for seed in seeds:
        outcome = simulate(seed, setting(seed), parts)
        runs, failed = runs + 1, failed + bool(outcome.violations)
        fired.update(outcome.fired)
        if outcome.violations:
            _say(f"{name} seed {seed}, {outcome.events} events: {'; '.join(outcome.violations)}")
    _say(f"{name}: {failed} of {runs} failed; " + ", ".join(f"{k} {n}" for k, n in sorted(fired.items())))
    return failed


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Runs many seeds: `python tests/simulation --seeds 10000`. Prints what failed; exits 1 if anything did.

With `--off RULE` a rule is off, and the seeds whose oracle sees it are what one looks for.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable

from broken_rules import BROKEN_RULES
from sim_run import JOBS, drawn_setting, simulate
from sim_shard import REAL, Parts


def main() -> int:
    """Run and return the exit code."""
    parser = argparse.ArgumentParser(description="Simulates jobs under faults, seed by seed.")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds of each job")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--job", default="", metavar="ORACLE/POLICY", help="only this job, such as torn/async")
    parser.add_argument("--off", choices=sorted(BROKEN_RULES), help="switch a rule off")
    arguments = parser.parse_args()
    jobs, parts = [job for job in JOBS if arguments.job in ("", "/".join(job))], REAL
    if arguments.off:
        broken = BROKEN_RULES[arguments.off]
        jobs, parts = [(broken.oracle, broken.policy)], broken.parts
    if not jobs:
        parser.error(f"--job is one of {', '.join('/'.join(job) for job in JOBS)}")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return int(any([_failures(oracle, policy, seeds, parts) for oracle, policy in jobs]))


def _failures(oracle: str, policy: str, seeds: Iterable[int], parts: Parts) -> int:
    failed, runs, fired = 0, 0, Counter[str]()
    for seed in seeds:
        outcome = simulate(seed, drawn_setting(seed, oracle, policy), parts)
        runs, failed = runs + 1, failed + bool(outcome.violations)
        fired.update(outcome.fired)
        if outcome.violations:
            _say(f"{oracle}/{policy} seed {seed}, {outcome.events} events: {'; '.join(outcome.violations)}")
    _say(f"{oracle}/{policy}: {failed} of {runs} failed; " + ", ".join(f"{k} {n}" for k, n in sorted(fired.items())))
    return failed


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Fault injection into a running job: a proxy for network faults, a seeded schedule of faults, and a runner."""

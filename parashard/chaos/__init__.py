"""Chaos: a job under faults on purpose. A proxy for faults of the network, a schedule of faults, and a runner."""

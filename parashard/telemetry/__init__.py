"""Metrics, health and traces of a process."""

"""Rendering a job as manifests of a container platform."""

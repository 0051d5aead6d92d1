"""Rendering a job as the manifests of a platform that runs containers."""

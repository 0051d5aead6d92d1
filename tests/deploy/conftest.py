"""What tests of the manifests share: each folder that can be applied, as Kustomize renders it."""

from __future__ import annotations

import pytest

from support.k8s_manifests import K8S, KUSTOMIZATIONS, Manifest, kustomized


@pytest.fixture(scope="module", params=KUSTOMIZATIONS)
def kustomization(request: pytest.FixtureRequest) -> str:
    """Return the folder, below deploy/k8s."""
    return str(request.param)


@pytest.fixture(scope="module")
def manifests(kustomization: str) -> list[Manifest]:
    """Return its objects, not to be changed."""
    return kustomized(K8S / kustomization)

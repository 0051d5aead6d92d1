"""Who may reach which port of whom, worked out of rendered NetworkPolicies by the rules of Kubernetes' documentation.

Knows labels, named ports, and rules without peers or ports. Refuses what no policy of ours has (`ipBlock`, `endPort`)
rather than misread it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from support.k8s_manifests import Manifest, component, of_kind, pod_templates

HERE = "here"
"""The namespace that the manifests are applied to."""
UNNAMED_PORT = 9
"""Stands for every port without a name."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"

Reach = dict[tuple[str, str], set[str]]
"""By who and whom: ports, such as `TCP 7000`. Pairs without a port are not in it."""


@dataclass(frozen=True)
class Peer:
    """One who connects, or is connected to; with no namespace, no pod, so that only rules without peers admit it."""

    name: str
    namespace: str | None
    labels: Mapping[str, str]
    ports: Mapping[str, int]


def our_peers(manifests: list[Manifest]) -> list[Peer]:
    """Return our processes' pods, one for each component."""
    return [
        Peer(component(template), HERE, template["metadata"]["labels"], named_ports(template["spec"]))
        for template in pod_templates(manifests)
    ]


def named_ports(pod: Manifest) -> dict[str, int]:
    """Return the ports of a pod, by name."""
    return {port["name"]: port["containerPort"] for container in pod["containers"] for port in container["ports"]}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector, empty or not, selects what has these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def reach(manifests: list[Manifest], foreign: Iterable[Peer]) -> Reach:
    """Return which ports of whom each of our pods may reach, and which of ours each foreign peer may."""
    ours = our_peers(manifests)
    policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")]
    ports = {UNNAMED_PORT, *(number for peer in ours for number in peer.ports.values()), *_numbers(policies)}
    found: Reach = {}
    others = list(foreign)
    for source, target in [*product(ours, [*ours, *others]), *product(others, ours)]:
        allowed = {
            f"{protocol} {number}"
            for protocol, number in product(("TCP", "UDP"), ports)
            if _passes(policies, "egress", source, target, (protocol, number), target)
            and _passes(policies, "ingress", target, source, (protocol, number), target)
        }
        if allowed:
            found[source.name, target.name] = allowed
    return found


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise AssertionError(expression)


def _passes(policies: list[Manifest], way: str, bound: Peer, other: Peer, port: tuple[str, int], target: Peer) -> bool:
    """Return whether the policies that bind one end let it have the other end at a port of the target.

    By https://kubernetes.io/docs/concepts/services-networking/network-policies/: a pod that no policy binds is free;
    one that some bind may do what any of them allows.
    """
    binding = [
        policy
        for policy in policies
        if bound.namespace == HERE
        and way.capitalize() in policy["policyTypes"]
        and selects(policy["podSelector"], bound.labels)
    ]
    rules = [rule for policy in binding for rule in policy.get(way, ())]
    return not binding or any(_admits(rule, way, other, port, target) for rule in rules)


def _admits(rule: Manifest, way: str, other: Peer, port: tuple[str, int], target: Peer) -> bool:
    peers = rule.get("from" if way == "ingress" else "to")
    assert set(rule) <= {"ports", "from" if way == "ingress" else "to"}
    ports = rule.get("ports")
    return (not peers or any(_is_peer(peer, other) for peer in peers)) and (
        not ports or any(_is_port(one, port, target) for one in ports)
    )


def _is_peer(rule: Mapping[str, Any], other: Peer) -> bool:
    assert rule
    assert set(rule) <= {"podSelector", "namespaceSelector"}, rule
    if other.namespace is None:
        return False
    if "namespaceSelector" in rule:
        there = selects(rule["namespaceSelector"], {NAMESPACE_LABEL: other.namespace})
    else:
        there = other.namespace == HERE
    return there and selects(rule.get("podSelector", {}), other.labels)


def _is_port(rule: Mapping[str, Any], port: tuple[str, int], target: Peer) -> bool:
    assert set(rule) <= {"protocol", "port"}, rule
    number = target.ports.get(rule["port"]) if isinstance(rule["port"], str) else rule["port"]
    return (rule.get("protocol", "TCP"), number) == port


def _numbers(policies: list[Manifest]) -> Iterator[int]:
    """Yield the port numbers that policies name."""
    for policy in policies:
        for rule in [*policy.get("ingress", ()), *policy.get("egress", ())]:
            yield from (port["port"] for port in rule.get("ports", ()) if isinstance(port["port"], int))

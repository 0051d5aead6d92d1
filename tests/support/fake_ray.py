"""FakeRay: as much of Ray as `parashard.launch.ray_cluster` calls, of which a test says what actors answer.

No process runs: `actors["worker-0"].tell(...)` is news of it, `fail(...)` an error of Ray's in their place.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """As Ray's, of which the others are kinds."""


class RayActorError(RayError):
    pass


class ActorDiedError(RayActorError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class RuntimeEnvSetupError(RayError):
    pass


class AuthenticationError(RayError):
    pass


class FakeActor:
    """An actor: the calls that it was sent, and what the last call for news is answered with."""

    def __init__(self, options: dict[str, Any], order: str) -> None:
        self.options, self.order = options, json.loads(order)
        self.calls: list[str] = []
        self.is_killed = False
        self.leave = SimpleNamespace(remote=self._leave)
        self.answers: dict[int, object] = {}
        self.news = SimpleNamespace(remote=self._news)
        self.answers_to_requests: list[dict[str, Any]] = []
        self.take_certificate = SimpleNamespace(remote=lambda text: self.answers_to_requests.append(json.loads(text)))
        self.ask_to_end = SimpleNamespace(remote=lambda: self.calls.append("ask_to_end"))

    def _news(self, offset: int) -> tuple[FakeActor, int]:
        self.calls.append(f"news {offset}")
        return self, len(self.calls)

    def _leave(self) -> tuple[FakeActor, int]:
        self.calls.append("leave")
        self.fail(ActorUnavailableError("The actor is temporarily unavailable."))
        self.answers[len(self.calls)] = ActorUnavailableError("The actor is temporarily unavailable.")
        return self, len(self.calls)

    def tell(
        self,
        node: str,
        output: str = "",
        offset: int = 0,
        exit_code: int | None = None,
        reason: str = "",
        **more: str,
    ) -> None:
        """Answer the last call for news."""
        news = {"node": node, "output": output, "offset": offset, "exit_code": exit_code, "reason": reason, **more}
        self._answer(json.dumps(news))

    def fail(self, error: RayError) -> None:
        """Have the last call for news end with an error of Ray's."""
        self._answer(error)

    def _answer(self, answer: object) -> None:
        self.answers[max(n for n, call in enumerate(self.calls, 1) if call.startswith("news"))] = answer


class FakeRay:
    """The module, connected to a cluster."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        ActorDiedError=ActorDiedError,
        ActorUnavailableError=ActorUnavailableError,
        AuthenticationError=AuthenticationError,
        RuntimeEnvSetupError=RuntimeEnvSetupError,
    )

    def __init__(self) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.bundle_nodes: dict[int, str] = {}
        self.addresses: dict[str, str] = {}
        self.head_error: RayError | None = None
        """Of each question to the head, and without it `kill` does nothing."""
        self.is_removed = self.is_shut_down = False
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)),
            get_node_ip_address=lambda: "127.0.0.2",
            placement_group=self._group,
            placement_group_table=lambda group: {
                "bundles_to_node_id": self.bundle_nodes,
                "state": "REMOVED" if self.is_removed else "CREATED",
            },
            remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: index),
        )

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="192.0.2.1:6379")

    def is_initialized(self) -> bool:
        return True

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Answer a question to the head."""
        if self.head_error is not None:
            raise self.head_error
        return answer

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda order: self._started(given, order))

        return SimpleNamespace(options=options)

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert (num_returns, timeout) == (len(refs), 0), "a wait can crash where Ray goes away"
        ready = [ref for ref in refs if ref[1] in ref[0].answers]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: tuple[FakeActor, int]) -> str:
        answer = ref[0].answers.pop(ref[1])
        if isinstance(answer, RayError):
            raise answer
        return str(answer)

    def kill(self, actor: FakeActor) -> None:
        if not actor.is_killed and self.head_error is None:
            actor.is_killed = True
            actor.fail(ActorDiedError("The actor died.\nIt was killed by `ray.kill`."))

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _started(self, options: dict[str, Any], order: str) -> FakeActor:
        actor = FakeActor(options, order)
        self.actors[actor.order["name"]] = actor
        return actor

    def _remove(self, group: object) -> None:
        assert self.head_error is None, "it would wait for the head"
        self.is_removed = True

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> object:
        self.groups.append((bundles, strategy))
        return object()

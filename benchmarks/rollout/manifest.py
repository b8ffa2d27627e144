"""The rendered objects, as far as a kubelet and the controllers need them. Plain data in, values out.

What a pod here cannot do as the YAML says it is refused, so that nothing of it is passed over in silence.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.rollout.probes import Action, ExecAction, GrpcAction, HttpAction, Probe, TcpAction

_DEFAULT_GRACE_S: Final = 30.0


class ManifestError(Exception):
    """The objects lack something, or ask for what cannot be done without a cluster."""


@dataclass(frozen=True, slots=True)
class Container:
    """What runs in a pod. ``files`` are those of its config volume, by their path in the container."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    working_folder: str
    ports: Mapping[str, int]
    files: Mapping[str, bytes]
    #: Folders that are the pod's own and empty at first.
    empty_folders: tuple[str, ...]
    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None
    pre_stop_s: float


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A kind of pod. ``release`` tells one from another: the name of its config."""

    release: str
    container: Container
    grace_s: float


@dataclass(frozen=True, slots=True)
class Strategy:
    """The surge and unavailability of a rolling update, in pods."""

    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A Deployment with what belongs to it."""

    replicas: int
    strategy: Strategy
    min_ready_s: float
    template: PodTemplate
    #: Of the disruption budget: how many pods may be missing when one is evicted.
    max_disrupted: int


def read(objects: Iterable[Mapping[str, Any]]) -> Manifest:
    """The Deployment among these objects.

    Raises:
        ManifestError: there is none, or it has what is not known here.
    """
    objects = list(objects)
    spec = _only(objects, "Deployment")["spec"]
    # The Deployment leaves the number to the autoscaler, whose smallest it is while there is little load.
    replicas = spec.get("replicas") or _only(objects, "HorizontalPodAutoscaler")["spec"]["minReplicas"]
    budget = _only(objects, "PodDisruptionBudget")["spec"]
    return Manifest(
        replicas=replicas,
        strategy=strategy(spec["strategy"], replicas),
        min_ready_s=float(spec.get("minReadySeconds", 0)),
        template=_template(spec["template"]["spec"], objects),
        max_disrupted=_pods(budget["maxUnavailable"], replicas, up=True),
    )


def strategy(said: Mapping[str, Any], replicas: int) -> Strategy:
    """Percentages become pods: a surge is rounded up, what may be missing down; not both are 0."""
    if said.get("type", "RollingUpdate") != "RollingUpdate":
        raise ManifestError(f"strategy: expected RollingUpdate, given {said['type']}")
    rolling = said.get("rollingUpdate", {})
    surge = _pods(rolling.get("maxSurge", "25%"), replicas, up=True)
    unavailable = _pods(rolling.get("maxUnavailable", "25%"), replicas, up=False)
    return Strategy(surge, unavailable if surge else max(1, unavailable))


def _pods(said: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(said, int):
        return said
    share = replicas * int(said.removesuffix("%")) / 100
    return math.ceil(share) if up else math.floor(share)


def _template(spec: Mapping[str, Any], objects: Iterable[Mapping[str, Any]]) -> PodTemplate:
    if len(spec["containers"]) != 1 or spec.get("initContainers"):
        raise ManifestError("expected one container, and none before it")
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    configs = [one["configMap"]["name"] for one in volumes.values() if "configMap" in one]
    if len(configs) != 1:
        raise ManifestError(f"expected one ConfigMap as a volume, given {len(configs)}")
    grace_s = float(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))
    container = _container(spec["containers"][0], volumes, objects)
    return PodTemplate(configs[0], container, grace_s)


def _container(
    one: Mapping[str, Any], volumes: Mapping[str, Any], objects: Iterable[Mapping[str, Any]]
) -> Container:
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in one.get("volumeMounts", ())}
    files: dict[str, bytes] = {}
    for folder, volume in mounted.items():
        if "configMap" in volume:
            content = _content(objects, volume["configMap"])
            files |= {f"{folder}/{path}": data for path, data in content.items()}
        elif "emptyDir" not in volume:
            raise ManifestError(f"volume {volume['name']}: expected a configMap or an emptyDir")
    return Container(
        command=(*one["command"], *one.get("args", ())),
        environment={entry["name"]: _value(entry) for entry in one.get("env", ())},
        working_folder=one.get("workingDir", "/"),
        ports=ports,
        files=files,
        # Shared memory of clients in the same pod is not part of a rollout: /dev/shm stays the machine's.
        empty_folders=tuple(at for at, on in mounted.items() if "emptyDir" in on and at != "/dev/shm"),
        startup=_probe(one.get("startupProbe"), ports),
        readiness=_probe(one.get("readinessProbe"), ports),
        liveness=_probe(one.get("livenessProbe"), ports),
        pre_stop_s=_pre_stop(one.get("lifecycle", {})),
    )


def _content(objects: Iterable[Mapping[str, Any]], volume: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of a ConfigMap by the paths that its volume gives them."""
    config = _only([one for one in objects if one["metadata"]["name"] == volume["name"]], "ConfigMap")
    data = {key: text.encode() for key, text in config.get("data", {}).items()}
    data |= {key: base64.b64decode(text) for key, text in config.get("binaryData", {}).items()}
    return {item["path"]: data[item["key"]] for item in volume["items"]}


def _value(entry: Mapping[str, Any]) -> str:
    if "value" not in entry:
        raise ManifestError(f"env {entry['name']}: expected a value")
    return str(entry["value"])


def _pre_stop(lifecycle: Mapping[str, Any]) -> float:
    hook = lifecycle.get("preStop")
    if hook is None:
        return 0.0
    if set(hook) != {"sleep"}:
        raise ManifestError(f"preStop: expected sleep, given {', '.join(hook)}")
    return float(hook["sleep"]["seconds"])


def _probe(said: Mapping[str, Any] | None, ports: Mapping[str, int]) -> Probe | None:
    """A probe with the defaults of the Kubernetes API."""
    if said is None:
        return None
    grace_s = said.get("terminationGracePeriodSeconds")
    return Probe(
        action=_action(said, ports),
        initial_delay_s=float(said.get("initialDelaySeconds", 0)),
        period_s=float(said.get("periodSeconds", 10)),
        timeout_s=float(said.get("timeoutSeconds", 1)),
        failure_threshold=int(said.get("failureThreshold", 3)),
        success_threshold=int(said.get("successThreshold", 1)),
        grace_s=None if grace_s is None else float(grace_s),
    )


def _action(said: Mapping[str, Any], ports: Mapping[str, int]) -> Action:
    if "grpc" in said:
        return GrpcAction(int(said["grpc"]["port"]), said["grpc"].get("service", ""))
    if "httpGet" in said and said["httpGet"].get("scheme", "HTTP") == "HTTP":
        port = said["httpGet"]["port"]
        return HttpAction(ports[port] if port in ports else int(port), said["httpGet"].get("path", "/"))
    if "tcpSocket" in said:
        port = said["tcpSocket"]["port"]
        return TcpAction(ports[port] if port in ports else int(port))
    if "exec" in said:
        return ExecAction(tuple(said["exec"]["command"]))
    raise ManifestError(f"probe: expected grpc, httpGet over HTTP, tcpSocket or exec, given {dict(said)}")


def _only(objects: Iterable[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    found = [one for one in objects if one["kind"] == kind]
    if len(found) != 1:
        raise ManifestError(f"expected one {kind}, given {len(found)}")
    return found[0]

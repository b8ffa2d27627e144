"""The pod: one container with the server, its probes and its volumes. KServe's runtime has the same parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuserve.export.manifests import config_objects
from gpuserve.export.sizing.ports import ServerPorts, container_ports, probe_action
from gpuserve.export.sizing.sizing import STARTUP_PERIOD_S
from gpuserve.export.sizing.values import Reasoned

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuserve.config.load import Configuration
    from gpuserve.export.sizing.files import Bundle
    from gpuserve.export.sizing.options import ExportOptions
    from gpuserve.export.sizing.sizing import Sizes
    from gpuserve.settings.server import ServerSettings

CONTAINER: Final = "gpuserve"
#: The user of the Dockerfile.
UID: Final = 10001
#: Where relative paths begin, and what is written can be.
WORKING_FOLDER: Final = "/tmp"
TLS_FOLDER: Final = "/etc/gpuserve-tls"
_FIRST_UNPRIVILEGED_PORT: Final = 1024
#: Of the labels that the GPU operator and the device plugin give a node, the one that both do.
GPU_NODE: Final = {"nvidia.com/gpu.present": "true"}

#: What the Pod Security Standard "restricted" asks of a container.
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "privileged": False,
    "capabilities": {"drop": ["ALL"]},
}
#: A connection to a pod is made anew after so long.
CONNECTION_AGE_S: Final = 300
#: As long as clients with connections that they keep need to hear of the end by an answer.
LAME_DUCK_S: Final = 2
_DEFAULTS: Final[dict[str, str | Reasoned]] = {
    "log_format": "json",
    "max_connection_age_s": Reasoned(
        str(CONNECTION_AGE_S), "Clients that connect anew find pods that were not there before."
    ),
    "lame_duck_s": Reasoned(
        str(LAME_DUCK_S),
        "After SIGTERM connections that are kept are told that they end, and served meanwhile.",
    ),
}


@dataclass(frozen=True, slots=True)
class PodParts:
    """What the pods and the objects around them are made of."""

    name: str
    options: ExportOptions
    settings: ServerSettings
    sizes: Sizes
    bundle: Bundle
    ports: ServerPorts
    #: The keys of ``server`` that the file has; of others, some have another default in a pod.
    said: frozenset[str]

    @property
    def labels(self) -> dict[str, str]:
        """By which pods are found; never changed, since a Deployment's selector cannot be."""
        return {"app.kubernetes.io/name": "gpuserve", "app.kubernetes.io/instance": self.name}

    def metadata(self, suffix: str = "", **more: Any) -> dict[str, Any]:
        """The metadata of an object called by our name and this suffix."""
        return self.named(self.name + suffix, **more)

    def named(self, name: str, **more: Any) -> dict[str, Any]:
        """Metadata with the namespace, where one was given."""
        space = {"namespace": self.options.namespace} if self.options.namespace else {}
        return {"name": name, **space, "labels": self.labels, **more}

    @property
    def is_secret(self) -> bool:
        return config_objects.holds_token(self.settings)

    @property
    def config_name(self) -> str:
        return config_objects.config_name(self.name, self.bundle)

    @property
    def on_gpu(self) -> bool:
        return bool(self.sizes.gpus.value)

    @property
    def tls_secret(self) -> str:
        """The Secret with the certificate; "" where no port speaks TLS."""
        return (self.options.tls_secret or f"{self.name}-tls") if self.ports.tls else ""


def pod_spec(parts: PodParts) -> dict[str, Any]:
    """The ``spec`` of a pod, as a dict."""
    return {
        "serviceAccountName": parts.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": parts.sizes.grace_s,
        **(gpu_node() if parts.on_gpu else {}),
        **spread(parts, parts.labels),
        "securityContext": pod_security(parts),
        "containers": [container(parts, CONTAINER)],
        "volumes": volumes(parts),
    }


def gpu_node() -> dict[str, Any]:
    """The node selector and tolerations of a pod with a GPU."""
    return {
        "nodeSelector": dict(GPU_NODE),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }


def spread(parts: PodParts, labels: dict[str, str]) -> dict[str, Any]:
    """The affinity of pods: one a node, and nodes in different zones where possible."""
    selector = {"labelSelector": {"matchLabels": labels}}
    term = {**selector, "topologyKey": "kubernetes.io/hostname"}
    if takes_node(parts):
        why = "One pod a GPU node: it has every GPU of it."
        anti: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": Reasoned([term], why)}
    else:
        preferred = {"weight": 100, "podAffinityTerm": term}
        anti = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    zone = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        **selector,
    }
    why = "As even as zones allow, and a pod rather than none where they do not."
    return {"affinity": {"podAntiAffinity": anti}, "topologySpreadConstraints": [Reasoned(zone, why)]}


def takes_node(parts: PodParts) -> bool:
    """Whether no second pod has a place on a node: every GPU is taken, as far as is known."""
    per_node = parts.options.gpus_per_node
    return parts.on_gpu and (per_node is None or parts.sizes.gpus.value >= per_node)


def pod_security(parts: PodParts) -> dict[str, Any]:
    """The security context of a pod, as the Pod Security Standard "restricted" asks."""
    low = any(port < _FIRST_UNPRIVILEGED_PORT for port in parts.ports.numbers.values())
    sysctl = {"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}
    why = "A port below 1024, and a user who is not root; this sysctl is a safe one."
    return {
        "runAsNonRoot": True,
        "runAsUser": Reasoned(UID, "The user of the Dockerfile."),
        "runAsGroup": UID,
        "fsGroup": UID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **({"sysctls": Reasoned([sysctl], why)} if low else {}),
    }


def container(parts: PodParts, name: str) -> dict[str, Any]:
    """The container of the server."""
    sleep = {"lifecycle": {"preStop": {"sleep": {"seconds": parts.sizes.pre_stop_s}}}}
    return {
        "name": name,
        "image": parts.options.image,
        "command": ["gpuserve", "serve", f"{config_objects.FOLDER}/{parts.bundle.config}"],
        "workingDir": WORKING_FOLDER,
        "env": environment(parts),
        "ports": container_ports(parts.ports.numbers),
        "resources": resources(parts),
        **probes(parts),
        **(sleep if parts.sizes.pre_stop_s.value else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts(parts),
    }


def environment(parts: PodParts) -> list[dict[str, Any]]:
    """The environment variables of the container."""
    variables = [
        {
            "name": "HOME",
            "value": Reasoned(WORKING_FOLDER, "Libraries keep caches there; the root is read only."),
        },
        {"name": "OMP_NUM_THREADS", "value": parts.sizes.threads},
    ]
    variables += _default_variables(parts.said)
    if parts.ports.tls:
        files = {"TLS_CERTFILE": "tls.crt", "TLS_KEYFILE": "tls.key"}
        if parts.settings.tls_client_ca:
            files["TLS_CLIENT_CA"] = "ca.crt"
        variables += [
            {"name": f"GPUSERVE_SERVER__{key}", "value": f"{TLS_FOLDER}/{file}"}
            for key, file in files.items()
        ]
    return variables


def resources(parts: PodParts) -> dict[str, Any]:
    """Requests and limits of the container. On a GPU they are the same."""
    sizes = parts.sizes
    disk = Reasoned(sizes.ephemeral.value, "As requested: it is not shared.")
    limits: dict[str, Any] = {"memory": sizes.memory, "ephemeral-storage": disk}
    if parts.on_gpu:
        cpus = Reasoned(sizes.cpus.value, "As requested: whole cores can be the pod's own.")
        limits = {"cpu": cpus, **limits, parts.options.gpu_resource: sizes.gpus}
    requests = {
        "cpu": sizes.cpus,
        "memory": sizes.memory_request,
        "ephemeral-storage": sizes.ephemeral,
    }
    return {"requests": requests, "limits": limits}


def probes(parts: PodParts) -> dict[str, Any]:
    """The probes of the container, on a port without TLS."""
    startup = {
        **probe_action(parts.ports, "startup"),
        "periodSeconds": STARTUP_PERIOD_S,
        "timeoutSeconds": 2,
        "failureThreshold": parts.sizes.startup_failures,
    }
    readiness = {
        **probe_action(parts.ports, "readiness"),
        "periodSeconds": 2,
        "timeoutSeconds": 1,
        "failureThreshold": 2,
    }
    liveness = {
        **probe_action(parts.ports, "liveness"),
        "periodSeconds": 10,
        "timeoutSeconds": 3,
        "failureThreshold": 3,
        "terminationGracePeriodSeconds": 10,
    }
    first = "Until this says that all is loaded, nothing else is asked."
    soon = "Every 2 s, and one answer may be late: who is not ready gets no more requests after 4 s."
    hung = "30 s without an answer is a hang, which drains nothing: 10 s to end. Never by load or by models."
    return {
        "startupProbe": Reasoned(startup, first),
        "readinessProbe": Reasoned(readiness, soon),
        "livenessProbe": Reasoned(liveness, hung),
    }


def mounts(parts: PodParts) -> list[dict[str, Any]]:
    """The mounts of the volumes."""
    found: list[dict[str, Any]] = [
        {"name": "config", "mountPath": config_objects.FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": WORKING_FOLDER},
    ]
    if parts.tls_secret:
        found.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return found


def volumes(parts: PodParts) -> list[dict[str, Any]]:
    """The volumes by the names that ``mounts`` uses."""
    found: list[dict[str, Any]] = [
        config_objects.config_volume(parts.config_name, parts.bundle, secret=parts.is_secret),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": parts.sizes.shm}},
        {"name": "tmp", "emptyDir": {"sizeLimit": parts.sizes.tmp}},
    ]
    if parts.tls_secret:
        found.append({"name": "tls", "secret": {"secretName": parts.tls_secret, "defaultMode": 0o440}})
    return found


def in_pod(configuration: Configuration) -> Configuration:
    """A configuration as its pods run it, as far as sizes and times depend on it."""
    if "lame_duck_s" in said(configuration):
        return configuration
    settings = dataclasses.replace(configuration.settings, lame_duck_s=float(LAME_DUCK_S))
    return dataclasses.replace(configuration, settings=settings)


def said(configuration: Configuration) -> frozenset[str]:
    """The keys of ``server`` that the config file has."""
    return frozenset(configuration.entries.server.model_fields_set)


def _default_variables(said_keys: Collection[str]) -> list[dict[str, Any]]:
    """What the environment of the container says in place of a file that does not."""
    return [
        {"name": f"GPUSERVE_SERVER__{key.upper()}", "value": value}
        for key, value in _DEFAULTS.items()
        if key not in said_keys
    ]

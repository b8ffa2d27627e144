"""The Pod Security Standard "restricted", as a list of what a pod breaks of it. No test is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_PROFILES = ("RuntimeDefault", "Localhost")
_SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
}  # fmt: skip


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """What the spec of a pod breaks."""
    context = spec.get("securityContext", {})
    yield from (f"{key} is set" for key in _HOST if spec.get(key))
    for volume in spec.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            yield f"volume {volume['name']} is of kind {kinds}"
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in _SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']} is not safe"
    if "procMount" in str(spec) or "hostPath" in str(spec):
        yield "procMount or hostPath is used"
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        yield from (f"{container['name']}: {text}" for text in _container(container, context))


def _container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser is root"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in _PROFILES:
        yield "seccompProfile is not RuntimeDefault"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort is used"

"""What no schema checks of manifests: whether what names something else names something that is there.

Each check gives sentences, one for each thing that is wrong. No test is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from manifests import of_kind, pod_templates

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
Objects = list[dict[str, Any]]


def all_violations(objects: Objects) -> list[str]:
    checks = (
        duplicates, selectors, service_ports, probes, volumes, service_accounts, scale_targets,
        mounted_objects, policies, monitors,
    )  # fmt: skip
    return [text for check in checks for text in check(objects)]


def duplicates(objects: Objects) -> Iterator[str]:
    counts = Counter((one["kind"], one["metadata"]["name"]) for one in objects)
    yield from (
        f"{kind} {name} is there {count} times" for (kind, name), count in counts.items() if count > 1
    )


def selectors(objects: Objects) -> Iterator[str]:
    """Deployments choose their own pods; Services, budgets and policies choose some."""
    labels = [template["metadata"]["labels"] for template in pod_templates(objects)]
    if not of_kind(objects, "Deployment", "DaemonSet"):
        return
    for one in objects:
        wanted = {
            "Deployment": lambda one: one["spec"]["selector"]["matchLabels"],
            "DaemonSet": lambda one: one["spec"]["selector"]["matchLabels"],
            "PodDisruptionBudget": lambda one: one["spec"]["selector"]["matchLabels"],
            "NetworkPolicy": lambda one: one["spec"]["podSelector"]["matchLabels"],
            "Service": lambda one: one["spec"]["selector"],
        }.get(one["kind"])
        if wanted and not any(wanted(one).items() <= have.items() for have in labels):
            yield f"{one['kind']} {one['metadata']['name']} chooses no pod: {wanted(one)}"


def service_ports(objects: Objects) -> Iterator[str]:
    """The target of a Service is a named port of the container."""
    for template in pod_templates(objects):
        names = Counter(
            port["name"] for one in template["spec"]["containers"] for port in one.get("ports", ())
        )
        yield from (f"port {name} is there twice" for name, count in names.items() if count > 1)
        yield from (f"port name {name} is longer than 15" for name in names if len(name) > 15)
        for service in of_kind(objects, "Service"):
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in names:
                    yield f"Service {service['metadata']['name']}: no port {port['targetPort']}"


def probes(objects: Objects) -> Iterator[str]:
    """A probe asks a port that there is; a grpc probe needs its number."""
    for template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for name in _PROBES if ports else ():  # a container without ports has nobody to be asked
                probe = container[name]
                asked = probe["grpc"]["port"] if "grpc" in probe else probe["httpGet"]["port"]
                if asked not in (ports.values() if "grpc" in probe else ports):
                    yield f"{name}: no port {asked}"
                if probe["timeoutSeconds"] > probe["periodSeconds"]:
                    yield f"{name}: its time is longer than its period"


def volumes(objects: Objects) -> Iterator[str]:
    """Every mount has its volume, and every volume a mount."""
    for template in pod_templates(objects):
        spec = template["spec"]
        there = {one["name"] for one in spec["volumes"]}
        mounted = {one["name"] for container in spec["containers"] for one in container["volumeMounts"]}
        if there != mounted:
            yield f"volumes {sorted(there)}, mounts {sorted(mounted)}"
        for container in spec["containers"]:
            paths = Counter(one["mountPath"] for one in container["volumeMounts"])
            yield from (f"{path} is mounted twice" for path, count in paths.items() if count > 1)


def service_accounts(objects: Objects) -> Iterator[str]:
    there = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    for template in pod_templates(objects):
        name = template["spec"].get("serviceAccountName")
        if name is not None and name not in there:
            yield f"no ServiceAccount {name}"


def scale_targets(objects: Objects) -> Iterator[str]:
    """What scales, scales a Deployment that there is, and nothing else scales it."""
    deployments = {one["metadata"]["name"] for one in of_kind(objects, "Deployment")}
    scalers = of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")
    targets = Counter(one["spec"]["scaleTargetRef"]["name"] for one in scalers)
    yield from (f"no Deployment {name} to scale" for name in targets if name not in deployments)
    yield from (f"{name} is scaled twice" for name, count in targets.items() if count > 1)
    for one in scalers:
        spec = one["spec"]
        least = spec.get("minReplicas", spec.get("minReplicaCount"))
        most = spec.get("maxReplicas", spec.get("maxReplicaCount"))
        if least > most:
            yield f"{one['kind']}: {least} pods at least and {most} at most"


def mounted_objects(objects: Objects) -> Iterator[str]:
    """ConfigMaps of volumes are there, with the keys that are mounted."""
    there = {one["metadata"]["name"]: one for one in of_kind(objects, "ConfigMap", "Secret")}
    for template in pod_templates(objects):
        for volume in template["spec"]["volumes"]:
            source = volume.get("configMap")
            if source is None:
                continue
            found = there.get(source["name"])
            if found is None:
                yield f"no ConfigMap {source['name']}"
                continue
            keys = {*found.get("data", {}), *found.get("binaryData", {})}
            items = {item["key"] for item in source["items"]}
            if keys != items:
                yield f"ConfigMap {source['name']} has {sorted(keys)}, mounted are {sorted(items)}"


def policies(objects: Objects) -> Iterator[str]:
    """A policy lets in to every port that a Service leads to."""
    for template in pod_templates(objects):
        ports = {
            port["name"]: port["containerPort"]
            for one in template["spec"]["containers"]
            for port in one.get("ports", ())
        }
        for policy in of_kind(objects, "NetworkPolicy"):
            allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
            for service in of_kind(objects, "Service"):
                for port in service["spec"]["ports"]:
                    if ports.get(port["targetPort"]) not in allowed:
                        yield f"nobody may reach {port['targetPort']} of {service['metadata']['name']}"


def monitors(objects: Objects) -> Iterator[str]:
    """A ServiceMonitor chooses one Service, by labels, and a port that it has."""
    services = of_kind(objects, "Service")
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        if len(chosen) != 1:
            yield f"ServiceMonitor chooses {len(chosen)} Services"
            continue
        names = {port["name"] for port in chosen[0]["spec"]["ports"]}
        yield from (
            f"no port {end['port']}" for end in monitor["spec"]["endpoints"] if end["port"] not in names
        )

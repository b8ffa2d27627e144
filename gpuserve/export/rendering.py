"""A whole export: checked, computed, and as text by file name. The verbs are in ``cli/verbs/export.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpuserve.config.problems import ConfigProblems
from gpuserve.export.checks import (
    balancer_violations,
    compose_violations,
    fit_violations,
    monitoring_violations,
    violations,
)
from gpuserve.export.envoy import bootstrap, pods
from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.manifests import pod
from gpuserve.export.manifests.alerts import alert_places
from gpuserve.export.manifests.compose import compose_places
from gpuserve.export.manifests.dashboard import dashboard_text
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.options import export_name, problems
from gpuserve.export.sizing.sizing import gpu_count, instance_groups, sizes
from gpuserve.export.templates.filling import filled

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.sizing.options import ExportOptions

#: Text by path below the folder that is written.
Files = dict[str, str]


_BASE: Final = (
    "config.yaml",
    "serviceaccount.yaml",
    "deployment.yaml",
    "services.yaml",
    "networkpolicy.yaml",
    "disruptionbudget.yaml",
    "autoscaler.yaml",
)
#: What changes the base: the files of each component beside its kustomization. Components go together with
#: each other and with an overlay of a user's own, which overlays do not.
_COMPONENTS: Final = {
    "surge": (),
    "writable-root": (),
    "daemonset": (),
    "keda": ("scaledobject.yaml",),
    "monitoring": ("servicemonitor.yaml", "prometheusrule.yaml", "dashboard.yaml"),
    "envoy": (
        "config.yaml",
        "deployment.yaml",
        "service.yaml",
        "networkpolicy.yaml",
        "disruptionbudget.yaml",
    ),
}
_ONLY_ON_GPU: Final = {"surge", "writable-root"}
#: The template of each file for Docker Compose, by where Prometheus or Grafana is given it.
_COMPOSE: Final = {
    "compose.yaml": "compose/compose.yaml",
    "prometheus.yaml": "compose/prometheus.yaml",
    "grafana/datasources.yaml": "compose/datasources.yaml",
    "grafana/dashboards.yaml": "compose/dashboards.yaml",
}
_PROMETHEUS_RULE: Final = "components/monitoring/prometheusrule.yaml"


def kubernetes(configuration: Configuration, options: ExportOptions) -> Files:
    """A kustomize base, its components, and an overlay for each; ConfigProblems: no cluster can run it."""
    places = _base_places(configuration, options) | {"resources": list(_BASE)}
    places |= pods.component_places(Proxy.of(configuration, options), configuration.settings.drain_timeout_s)
    names = [f"base/{file}" for file in (*_BASE, "kustomization.yaml")]
    files = {name: render(filled(name, places)) for name in names}
    for component, others in _COMPONENTS.items():
        if places["on_gpu"] or component not in _ONLY_ON_GPU:
            names = [f"components/{component}/{file}" for file in ("kustomization.yaml", *others)]
            files |= {name: render(filled(name, places)) for name in names}
            overlay = render(filled("overlay.yaml", {"component": component}))
            files[f"overlays/{component}/kustomization.yaml"] = overlay
    return files


def kubernetes_stream(configuration: Configuration, options: ExportOptions) -> str:
    """The base's objects as one stream, for ``kubectl apply -f -``; ConfigProblems: no cluster can run it."""
    places = _base_places(configuration, options)
    return render([one for file in _BASE for one in filled(f"base/{file}", places)])


def kserve_stream(configuration: Configuration, options: ExportOptions) -> str:
    """ServingRuntime, InferenceService and their config, for KServe's Standard mode: Knative lets a pod have
    one port. A runtime can set neither grace period nor security context: the service does. Or
    ConfigProblems.
    """
    places = checked_places(configuration, options)
    labels = {"serving.kserve.io/inferenceservice": places["name"]}
    # KServe looks for a container of this name.
    places = pod.with_pod(places, "kserve-container", pod.KSERVE_PORT_NAMES, labels)
    return render([*filled("base/config.yaml", places), *filled("kserve.yaml", places)])


def grafana_text(configuration: Configuration, options: ExportOptions) -> str:
    """The dashboard as JSON; ConfigProblems: the metrics page is switched off, or the name is none."""
    _refuse(configuration, monitoring_violations(configuration, options))
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    return dashboard_text(export_name(configuration, options), on_gpu=on_gpu)


def alerts_text(configuration: Configuration, options: ExportOptions) -> str:
    """The rules as a PrometheusRule; ConfigProblems: no metrics page is served, or the name is none."""
    _refuse(configuration, monitoring_violations(configuration, options))
    return render(_alerts(configuration, options))


def rules_text(configuration: Configuration, options: ExportOptions) -> str:
    """The same rules as a file of Prometheus itself; ConfigProblems as there."""
    _refuse(configuration, monitoring_violations(configuration, options))
    (rule,) = _alerts(configuration, options)
    return render([rule["spec"]])


def compose(configuration: Configuration, options: ExportOptions, config: str, mount: str) -> Files:
    """One server with Prometheus and Grafana for Docker Compose; ``mount`` is the config's folder as seen
    from that of the files. ConfigProblems: no image is named, or there is nothing to watch.
    """
    _refuse(configuration, compose_violations(configuration, options))
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    name = export_name(configuration, options)
    places = compose_places(name, configuration, options, config=config, mount=mount, on_gpu=on_gpu)
    files = {path: render(filled(template, places)) for path, template in _COMPOSE.items()}
    return files | {
        "rules.yaml": rules_text(configuration, options),
        "dashboard.json": grafana_text(configuration, options),
    }


def _alerts(configuration: Configuration, options: ExportOptions) -> list[Any]:
    places = alert_places(
        export_name(configuration, options),
        options.namespace,
        labels=None,
        max_arena_nbytes=configuration.settings.max_arena_nbytes,
        on_gpu=gpu_count(instance_groups(configuration, options)) > 0,
    )
    return filled(_PROMETHEUS_RULE, places)


def envoy(configuration: Configuration, options: ExportOptions, host: str = "") -> Files:
    """Envoy in front of the pods of ``host``, "" for their headless Service; ConfigProblems: unreachable."""
    _refuse(configuration, balancer_violations(configuration, options, host))
    return bootstrap.files(Proxy.of(configuration, options, host))


def checked_places(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    """What the templates are filled in with; ConfigProblems: a key or a flag that no cluster can run."""
    _refuse(configuration, violations(configuration, options))
    computed = sizes(configuration, options)
    groups = instance_groups(configuration, options)
    _refuse(configuration, fit_violations(configuration, options, computed, groups))
    return pod.export_places(configuration, options, computed)


def _base_places(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    places = checked_places(configuration, options)
    return pod.with_pod(places, "gpuserve", pod.PORT_NAMES, places["labels"])


def _refuse(configuration: Configuration, found: Any) -> None:
    """Raise ConfigProblems where anything was found."""
    if told := problems(configuration, found):
        raise ConfigProblems(told)

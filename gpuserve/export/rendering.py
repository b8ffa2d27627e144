"""A whole export: checked, computed, and as text by file name. ``cli/export.py`` has a verb for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuserve.config.messages import ConfigProblems
from gpuserve.export import kserve, kustomize, network, workload
from gpuserve.export.alerts import rules, scrape_selector
from gpuserve.export.checks import (
    balancer_violations,
    fit_violations,
    monitoring_violations,
    violations,
)
from gpuserve.export.components import components
from gpuserve.export.config_objects import config_object
from gpuserve.export.dashboard import dashboard_text
from gpuserve.export.envoy import bootstrap, pods
from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.files import bundle
from gpuserve.export.findings import problems
from gpuserve.export.names import export_name
from gpuserve.export.pod import Parts
from gpuserve.export.pod_defaults import in_pod, said
from gpuserve.export.ports import ServerPorts
from gpuserve.export.reservation import gpu_count, instance_groups
from gpuserve.export.sizing import sizes
from gpuserve.export.yaml_text import render

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.options import ExportOptions

#: Text by path below the folder that is written.
Files = dict[str, str]


def kubernetes(configuration: Configuration, options: ExportOptions) -> Files:
    """A kustomize base, components that change it, and an overlay for each of them.

    Raises:
        ConfigProblems: a key or a flag that no cluster can run.
    """
    parts = checked_parts(configuration, options)
    files = {f"base/{name}": render(documents) for name, documents in _base(parts, configuration).items()}
    resources = [name.removeprefix("base/") for name in files]
    files["base/kustomization.yaml"] = render([kustomize.base(resources)])
    made = components(parts, scaled_models(configuration))
    made["envoy"] = pods.component(parts, Proxy.of(configuration, options))
    for name, contents in made.items():
        files |= {f"components/{name}/{file}": text for file, text in contents.items()}
        files[f"overlays/{name}/kustomization.yaml"] = render([kustomize.overlay(name)])
    return files


def kubernetes_stream(configuration: Configuration, options: ExportOptions) -> str:
    """The objects of the base as one stream, for ``kubectl apply -f -``.

    Raises:
        ConfigProblems: a key or a flag that no cluster can run.
    """
    parts = checked_parts(configuration, options)
    return render([one for documents in _base(parts, configuration).values() for one in documents])


def kserve_stream(configuration: Configuration, options: ExportOptions) -> str:
    """ServingRuntime and InferenceService, and the config that they mount.

    Raises:
        ConfigProblems: a key or a flag that no cluster can run.
    """
    return render(kserve.objects(checked_parts(configuration, options), scaled_models(configuration)))


def grafana_text(configuration: Configuration, options: ExportOptions) -> str:
    """The dashboard as JSON.

    Raises:
        ConfigProblems: the metrics page is switched off, or the name is none.
    """
    _refuse(configuration, monitoring_violations(configuration, options))
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    return dashboard_text(export_name(configuration, options), on_gpu=on_gpu)


def alerts_text(configuration: Configuration, options: ExportOptions) -> str:
    """The alert rules as a PrometheusRule.

    Raises:
        ConfigProblems: the metrics page is switched off, or the name is none.
    """
    _refuse(configuration, monitoring_violations(configuration, options))
    name = export_name(configuration, options)
    space = {"namespace": options.namespace} if options.namespace else {}
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    nbytes = configuration.settings.max_arena_nbytes
    selector = scrape_selector(name, options.namespace)
    return render([rules({"name": name, **space}, selector, name, max_arena_nbytes=nbytes, on_gpu=on_gpu)])


def envoy(configuration: Configuration, options: ExportOptions, host: str = "") -> Files:
    """Envoy in front of the pods; ``host`` is a name with an address for each, "" their headless Service.

    Raises:
        ConfigProblems: a key or a flag that no pod can be reached with.
    """
    _refuse(configuration, balancer_violations(configuration, options, host))
    return bootstrap.files(Proxy.of(configuration, options, host))


def checked_parts(configuration: Configuration, options: ExportOptions) -> Parts:
    """What the pods are made of.

    Raises:
        ConfigProblems: a key or a flag that no cluster can run.
    """
    configuration = in_pod(configuration)
    _refuse(configuration, violations(configuration, options))
    computed = sizes(configuration, options)
    groups = instance_groups(configuration, options)
    _refuse(configuration, fit_violations(configuration, options, computed, groups))
    settings = configuration.settings
    return Parts(
        name=export_name(configuration, options),
        options=options,
        settings=settings,
        sizes=computed,
        bundle=bundle(configuration),
        ports=ServerPorts.of(settings, options),
        said=said(configuration),
    )


def scaled_models(configuration: Configuration) -> list[str]:
    """The models with instances, each once; an ensemble has none, and its steps are here."""
    return list(dict.fromkeys(model.name for model in configuration.models if model.instances))


def _base(parts: Parts, configuration: Configuration) -> dict[str, list[dict[str, Any]]]:
    """The objects of the base by file."""
    config = config_object(parts.named(parts.config_name), parts.bundle, secret=parts.is_secret)
    return {
        "config.yaml": [config],
        "serviceaccount.yaml": [workload.service_account(parts)],
        "deployment.yaml": [workload.deployment(parts)],
        "services.yaml": network.services(parts),
        "networkpolicy.yaml": [network.network_policy(parts)],
        "disruptionbudget.yaml": [workload.disruption_budget(parts)],
        "autoscaler.yaml": [workload.autoscaler(parts, scaled_models(configuration))],
    }


def _refuse(configuration: Configuration, found: Any) -> None:
    """Raises ConfigProblems: where anything was found."""
    if told := problems(configuration, found):
        raise ConfigProblems(told)

"""A whole export: checked, computed, and as text by file name. The verbs are in ``cli/verbs/export.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuserve.config.messages import ConfigProblems
from gpuserve.export.checks import (
    balancer_violations,
    fit_violations,
    monitoring_violations,
    violations,
)
from gpuserve.export.envoy import bootstrap, pods
from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.manifests import kserve, network, workload
from gpuserve.export.manifests.alerts import rules, scrape_selector
from gpuserve.export.manifests.components import components, kustomization, kustomization_overlay
from gpuserve.export.manifests.config_objects import config_object
from gpuserve.export.manifests.dashboard import dashboard_text
from gpuserve.export.manifests.pod import PodParts, in_pod, said
from gpuserve.export.manifests.yaml_text import render
from gpuserve.export.sizing.files import bundle
from gpuserve.export.sizing.options import export_name, problems
from gpuserve.export.sizing.ports import ServerPorts
from gpuserve.export.sizing.sizing import gpu_count, instance_groups, sizes

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.sizing.options import ExportOptions

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
    files["base/kustomization.yaml"] = render([kustomization(resources)])
    made = components(parts, scaled_models(configuration))
    made["envoy"] = pods.component(parts, Proxy.of(configuration, options))
    for name, contents in made.items():
        files |= {f"components/{name}/{file}": text for file, text in contents.items()}
        files[f"overlays/{name}/kustomization.yaml"] = render([kustomization_overlay(name)])
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


def checked_parts(configuration: Configuration, options: ExportOptions) -> PodParts:
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
    return PodParts(
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


def _base(parts: PodParts, configuration: Configuration) -> dict[str, list[dict[str, Any]]]:
    """The objects of the base by file name."""
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
    """Raise ConfigProblems where anything was found."""
    if told := problems(configuration, found):
        raise ConfigProblems(told)

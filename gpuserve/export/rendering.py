"""A whole export, from the configuration to written files: checks, sizes, rendered templates, output."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuserve.config.problems import ConfigProblems, Origin, Problem
from gpuserve.core.errors import GpuserveError
from gpuserve.export import envoy_proxy, manifest_values
from gpuserve.export.envoy_proxy import EnvoyProxy
from gpuserve.export.export_checks import (
    balancer_violations,
    cluster_violations,
    compose_violations,
    fit_violations,
    monitoring_violations,
    systemd_violations,
)
from gpuserve.export.export_options import export_name, problems_of
from gpuserve.export.manifest_templates import fill_template, yaml_text
from gpuserve.export.manifest_values import alert_values, compose_values, dashboard_text
from gpuserve.export.pod_sizing import compute_sizes, gpu_count, instance_groups
from gpuserve.export.systemd_units import systemd_units

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.export_options import ExportOptions


#: Texts of files, by their paths relative to the output folder.
ExportFiles = dict[str, str]


_BASE: Final = (
    "config.yaml", "serviceaccount.yaml", "deployment.yaml", "services.yaml", "networkpolicy.yaml",
    "disruptionbudget.yaml", "autoscaler.yaml",
)  # fmt: skip
#: The files of each component beside its kustomization. Components change the base; unlike overlays they can
#: be combined with each other and with an overlay of the user's own.
_COMPONENTS: Final = {
    "surge": (),
    "writable-root": (),
    "dra": ("resourceclaimtemplate.yaml",),
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
_ONLY_ON_GPU: Final = {"surge", "writable-root", "dra"}
#: The template of each file for Docker Compose, by the path at which Prometheus or Grafana reads the file.
_COMPOSE: Final = {
    "compose.yaml": "compose/compose.yaml",
    "prometheus.yaml": "compose/prometheus.yaml",
    "grafana/datasources.yaml": "compose/datasources.yaml",
    "grafana/dashboards.yaml": "compose/dashboards.yaml",
}
_PROMETHEUS_RULE: Final = "components/monitoring/prometheusrule.yaml"


def kubernetes_files(configuration: Configuration, options: ExportOptions) -> ExportFiles:
    """Return a kustomize base, its components, and an overlay for each, or raise ConfigProblems."""
    values = _base_values(configuration, options) | {"resources": list(_BASE)}
    values |= envoy_proxy.component_values(
        EnvoyProxy.of(configuration, options), configuration.settings.drain_timeout_s
    )
    names = [f"base/{file}" for file in (*_BASE, "kustomization.yaml")]
    files = {name: yaml_text(fill_template(name, values)) for name in names}
    for component, others in _COMPONENTS.items():
        if values["on_gpu"] or component not in _ONLY_ON_GPU:
            names = [f"components/{component}/{file}" for file in ("kustomization.yaml", *others)]
            files |= {name: yaml_text(fill_template(name, values)) for name in names}
            overlay = yaml_text(fill_template("overlay.yaml", {"component": component}))
            files[f"overlays/{component}/kustomization.yaml"] = overlay
    return files


def kubernetes_stream(configuration: Configuration, options: ExportOptions) -> str:
    """Return the base's objects as one stream for ``kubectl apply -f -``, or raise ConfigProblems."""
    values = _base_values(configuration, options)
    return yaml_text([one for file in _BASE for one in fill_template(f"base/{file}", values)])


def kserve_stream(configuration: Configuration, options: ExportOptions) -> str:
    """Return ServingRuntime, InferenceService and their config, for KServe's Standard mode: Knative allows a
    pod one port only. The service, not the runtime, sets grace period and security context, because a runtime
    cannot.
    """
    values = export_values(configuration, options)
    labels = {"serving.kserve.io/inferenceservice": values["name"]}
    # KServe looks for a container of this name.
    values = manifest_values.with_pod_values(
        values, "kserve-container", manifest_values.KSERVE_PORT_NAMES, labels
    )
    return yaml_text([*fill_template("base/config.yaml", values), *fill_template("kserve.yaml", values)])


def grafana_text(configuration: Configuration, options: ExportOptions) -> str:
    """Return the dashboard as JSON. Raise ConfigProblems without a metrics page, or for a malformed name."""
    _raise_if_any(configuration, monitoring_violations(configuration, options))
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    return dashboard_text(export_name(configuration, options), on_gpu=on_gpu)


def alerts_text(configuration: Configuration, options: ExportOptions) -> str:
    """Return the rules as a PrometheusRule, or raise ConfigProblems like ``grafana_text``."""
    _raise_if_any(configuration, monitoring_violations(configuration, options))
    return yaml_text(_alerts(configuration, options))


def rules_text(configuration: Configuration, options: ExportOptions) -> str:
    """Return the rules as a rule file of Prometheus; raise ConfigProblems like ``alerts_text``."""
    _raise_if_any(configuration, monitoring_violations(configuration, options))
    (rule,) = _alerts(configuration, options)
    return yaml_text([rule["spec"]])


def compose_files(
    configuration: Configuration, options: ExportOptions, config: str, mount: str
) -> ExportFiles:
    """Return the files for one server with Prometheus and Grafana in Docker Compose. ``mount`` is the folder
    of the config, relative to the folder of the files. Raise ConfigProblems if no image is named, or the
    metrics page is switched off.
    """
    _raise_if_any(configuration, compose_violations(configuration, options))
    on_gpu = gpu_count(instance_groups(configuration, options)) > 0
    name = export_name(configuration, options)
    values = compose_values(name, configuration, options, config=config, mount=mount, on_gpu=on_gpu)
    files = {path: yaml_text(fill_template(template, values)) for path, template in _COMPOSE.items()}
    return files | {
        "rules.yaml": rules_text(configuration, options),
        "dashboard.json": grafana_text(configuration, options),
    }


def systemd_files(
    configuration: Configuration, options: ExportOptions, config: str, user: str
) -> ExportFiles:
    """Return the unit files for systemd, or raise ConfigProblems for a malformed name, host or port."""
    _raise_if_any(configuration, systemd_violations(configuration, options))
    return systemd_units(configuration, options, config, user)


def _alerts(configuration: Configuration, options: ExportOptions) -> list[Any]:
    values = alert_values(
        export_name(configuration, options),
        options.namespace,
        labels=None,
        max_arena_nbytes=configuration.settings.max_arena_nbytes,
        on_gpu=gpu_count(instance_groups(configuration, options)) > 0,
    )
    return fill_template(_PROMETHEUS_RULE, values)


def envoy_config_files(configuration: Configuration, options: ExportOptions, host: str = "") -> ExportFiles:
    """Return the configuration of Envoy in front of the pods of ``host``, "" for their headless Service."""
    _raise_if_any(configuration, balancer_violations(configuration, options, host))
    return envoy_proxy.envoy_files(EnvoyProxy.of(configuration, options, host))


def export_values(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    """Return the values of the templates' placeholders, or raise ConfigProblems."""
    _raise_if_any(configuration, cluster_violations(configuration, options))
    computed = compute_sizes(configuration, options)
    groups = instance_groups(configuration, options)
    _raise_if_any(configuration, fit_violations(configuration, options, computed, groups))
    return manifest_values.placeholder_values(configuration, options, computed)


def _base_values(configuration: Configuration, options: ExportOptions) -> dict[str, Any]:
    values = export_values(configuration, options)
    return manifest_values.with_pod_values(values, "gpuserve", manifest_values.PORT_NAMES, values["labels"])


def _raise_if_any(configuration: Configuration, found: Any) -> None:
    if found_problems := problems_of(configuration, found):
        raise ConfigProblems(found_problems)


#: The mode of a file that holds a token: readable by its owner only.
_SECRET_MODE: Final = 0o600
_USUAL_MODE: Final = 0o666
#: Marks of a file that holds a token: a Secret, or the header with a token in a configuration of Envoy.
_SECRETS: Final = ("kind: Secret\n", "key: authorization\n")


def write_files(folder: str, files: ExportFiles) -> None:
    """Write every file below the folder, which is created; other files stay. Raise ConfigProblems if the
    folder cannot be written; then all files are unchanged, unless renaming a written file failed.
    """
    if not folder:
        raise _out_problem("expected a folder, given ''")
    staging = _StagedFiles()
    try:
        for name, text in files.items():
            staging.add(Path(folder, name), text)
        staging.commit()
    except OSError as error:
        raise _out_problem(f"{folder!r} cannot be written: {_os_reason(error)}") from None
    finally:
        staging.clear()


def write_stdout(text: str) -> None:
    """Write to stdout. Raise GpuserveError if stdout cannot be written, BrokenPipeError if nobody reads."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the flush at exit must not fail again
        raise GpuserveError(f"stdout cannot be written: {_os_reason(error)}") from None


class _StagedFiles:
    """Temporary files beside their targets, which replace the targets when all are written."""

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path]] = []
        self._created_folders: list[Path] = []

    def add(self, path: Path, text: str) -> None:
        self._create_folder(path.parent)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path.name} is a directory")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._staged.append((temporary, path))
        is_secret = any(mark in text for mark in _SECRETS)
        temporary.touch(_SECRET_MODE if is_secret else _USUAL_MODE)
        temporary.write_text(text, encoding="utf-8")

    def commit(self) -> None:
        for temporary, path in self._staged:
            temporary.replace(path)
        self._created_folders.clear()

    def clear(self) -> None:
        """Remove remaining temporary files, and the folders that were created for them."""
        for temporary, _ in self._staged:
            temporary.unlink(missing_ok=True)
        for folder in reversed(self._created_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _create_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        self._create_folder(folder.parent)
        folder.mkdir()
        self._created_folders.append(folder)


def _out_problem(text: str) -> ConfigProblems:
    return ConfigProblems([Problem("--out", text, Origin.FLAG)])


def _os_reason(error: OSError) -> str:
    return (error.strerror or "unknown reason").lower()

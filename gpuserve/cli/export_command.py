"""``gpuserve export``: files for clusters and machines, a balancer, a dashboard and alerts, from a config."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuserve.cli.exit_codes import help_text
from gpuserve.cli.option_types import keyword, option, with_options
from gpuserve.export.export_options import ExportOptions

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.rendering import ExportFiles


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file that the pods serve.")]
Name = Annotated[
    str, option(None, "Name in the cluster; default that of the only model, or gpuserve.", metavar="NAME")
]
Namespace = Annotated[str, option(None, "Namespace; default the namespace of kubectl apply.", metavar="NAME")]
Host = Annotated[
    str,
    option(None, "DNS name with an address for each pod; default their headless Service.", metavar="NAME"),
]
TlsSecret = Annotated[
    str, option(None, "The Secret with the pods' TLS certificate, if they use one.", metavar="NAME")
]
Image = Annotated[
    str, typer.Option("--image", help="Image of the server, with a tag or a digest.", metavar="IMAGE")
]
ComposeName = Annotated[
    str, option(None, "Name of the project; default that of the only model, or gpuserve.", metavar="NAME")
]
Mount = Annotated[
    str,
    option(None, "Folder of the config, relative to the files; default its present folder.", metavar="DIR"),
]
User = Annotated[
    str, option(None, "Account of the service; default the user of this command.", metavar="NAME")
]
Folder = Annotated[str, option(None, "Folder for the files.", metavar="DIR")]
Plain = Annotated[
    bool, typer.Option("--plain", help="Write a rule file for Prometheus without its operator.")
]
Out = Annotated[str | None, option(None, "Folder for the files; default is stdout.", metavar="DIR")]


def export_app() -> typer.Typer:
    text = "Write manifests for Kubernetes or KServe, a balancer, a dashboard, alerts, from a config file."
    app = typer.Typer(name="export", help=text, no_args_is_help=True)
    for verb in (kubernetes, kserve, compose, systemd, envoy, grafana, alerts):
        app.command(epilog=help_text())(verb)
    return app


#: Fields of ``ExportOptions`` by the parameter of the option, for options whose value is an amount of memory.
_MEMORY_FIELDS = {
    "node_memory": "node_memory_nbytes",
    "gpu_memory": "gpu_memory_nbytes",
    "min_gpu_memory": "min_gpu_memory_nbytes",
}
_DEFAULTS: Final = ExportOptions()
# fmt: off
_OPTIONS: Final = (
    keyword(None, "image", str, "", "Image of the pods, with a tag or a digest.", metavar="IMAGE"),
    keyword(None, "name", str, "",
            "Name of all objects; default that of the only model, or gpuserve.", metavar="NAME"),
    keyword(None, "namespace", str, "", "Namespace; default the namespace of kubectl apply.", metavar="NAME"),
    keyword(None, "replicas", int, _DEFAULTS.replicas, "Number of pods, at least.", least=1),
    keyword(None, "max_replicas", int | None, None,
            "Number of pods, at most; default four times --replicas.", least=1),
    keyword(None, "gpus_per_node", int | None, None,
            "GPUs of a node, or MIG slices; required if the config has cuda:*.", least=1),
    keyword(None, "gpu_resource", str, _DEFAULTS.gpu_resource,
            "Resource name of a GPU, such as nvidia.com/mig-1g.10gb.", metavar="RESOURCE"),
    keyword(None, "gpu_operator", bool, False,
            "Run on nodes that NVIDIA's GPU operator labels only; a plain device plugin sets no labels."),
    keyword(None, "gpu_product", str, "",
            "Run on nodes with this label nvidia.com/gpu.product only.", metavar="PRODUCT"),
    keyword(None, "min_gpu_memory", str | None, None,
            "Run on nodes whose label nvidia.com/gpu.memory is at least this, such as 79Gi.",
            metavar="MEMORY"),
    keyword(None, "gpu_sharing", str, "",
            "How the device plugin shares a GPU between pods: mps or time-slicing.", metavar="MODE"),
    keyword(None, "runtime_class", str, "", "RuntimeClass of the pods, such as nvidia.", metavar="NAME"),
    keyword(None, "node_cpus", int | None, None,
            "Cores of a node that pods may use; the config is checked against it.", least=1),
    keyword(None, "node_memory", str | None, None,
            "Memory of a node that pods may use, such as 64Gi; the config is checked against it.",
            metavar="MEMORY"),
    keyword(None, "gpu_memory", str | None, None,
            "Memory of a GPU; checked if gpu_memory_nbytes is set.", metavar="MEMORY"),
    keyword(None, "tls_secret", str, "",
            "Secret with tls.crt and tls.key, for pods that speak TLS.", metavar="NAME"),
    keyword(None, "prometheus", str, _DEFAULTS.prometheus,
            "URL of Prometheus, which KEDA queries.", metavar="URL"),
)
# fmt: on
_with_pod_options = partial(with_options, options=_OPTIONS)


def _export_options(flags: dict[str, Any]) -> ExportOptions:
    """Return the flags as ``ExportOptions``, memory in bytes."""
    given: dict[str, Any] = {name: value for name, value in flags.items() if name not in _MEMORY_FIELDS}
    amounts = {field: _nbytes(name, flags[name]) for name, field in _MEMORY_FIELDS.items()}
    return ExportOptions(**given | amounts)


def _nbytes(name: str, text: str | None) -> int | None:
    from gpuserve.export.pod_sizing import parse_nbytes

    try:
        return None if text is None else parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--" + name.replace("_", "-")) from None


@_with_pod_options
def kubernetes(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a kustomize base, with overlays for surge, DaemonSet, KEDA and monitoring.

    One pod a GPU node. Every number is computed from the config, and a comment explains it.
    The environment of this command has no effect, because pods have another one. Without
    --out the objects of the base go to stdout.

    Examples:
      gpuserve export kubernetes config.yaml --image my/models:1 --out cluster
      kubectl apply --server-side -k cluster/base
      gpuserve export kubernetes config.yaml --image my/models:1 > cluster.yaml
    """
    from gpuserve.export import rendering

    options, configuration = _export_options(flags), _load_config(config)
    if out is None:
        _write_files(out, {"": rendering.kubernetes_stream(configuration, options)})
    else:
        _write_files(out, rendering.kubernetes_files(configuration, options))


@_with_pod_options
def kserve(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a ServingRuntime and an InferenceService, for KServe in its Standard mode.

    Example:
      gpuserve export kserve config.yaml --image my/models:1 > kserve.yaml
    """
    from gpuserve.export import rendering

    options = _export_options(flags)
    _write_files(out, {"kserve.yaml": rendering.kserve_stream(_load_config(config), options)})


def compose(
    config: Config, image: Image, name: ComposeName = "", mount: Mount = "", out: Folder = "compose"
) -> None:
    """Write a server with Prometheus, Grafana, dashboard and alerts, for Docker Compose.

    The files are for one machine. The folder of the config is mounted, so the image needs
    gpuserve and the packages that the models import, and no models.

    Example:
      gpuserve export compose config.yaml --image my/gpuserve:1 --out compose
      docker compose --project-directory compose up
    """
    from gpuserve.export import rendering

    options = ExportOptions(image=image, name=name)
    mount = mount or os.path.relpath(os.path.dirname(os.path.abspath(config)), out)
    _write_files(out, rendering.compose_files(_load_config(config), options, config, mount))


def systemd(config: Config, name: Name = "", user: User = "", out: Out = None) -> None:
    """Write a service and a socket unit for systemd, on one machine.

    The socket unit keeps the ports: connections wait while the service restarts, so a restart
    or an upgrade refuses no client. The service runs the gpuserve of this command.

    Examples:
      gpuserve export systemd config.yaml --out /etc/systemd/system
      systemctl daemon-reload && systemctl enable --now gpuserve.socket gpuserve.service
    """
    from gpuserve.export import rendering

    options = ExportOptions(name=name)
    files = rendering.systemd_files(_load_config(config), options, config, user)
    if out is None:
        files = {"": "\n".join(f"# {file}\n{text}" for file, text in files.items())}
    _write_files(out, files)


def envoy(
    config: Config,
    name: Name = "",
    namespace: Namespace = "",
    host: Host = "",
    tls_secret: TlsSecret = "",
    out: Out = None,
) -> None:
    """Write the configuration of Envoy in front of the pods.

    Envoy balances single requests by the health of each pod, and retries requests that a
    dying pod has lost. With TLS there are several files.

    Examples:
      gpuserve export envoy config.yaml > envoy.yaml
      gpuserve export envoy config.yaml --host models.example --out /etc/envoy
    """
    from gpuserve.export import rendering

    options = ExportOptions(name=name, namespace=namespace, tls_secret=tls_secret)
    files = rendering.envoy_config_files(_load_config(config), options, host)
    if out is None and len(files) > 1:
        raise typer.BadParameter("expected a folder: with TLS there are several files", param_hint="--out")
    _write_files(out, files)


def grafana(config: Config, name: Name = "", out: Out = None) -> None:
    """Write a dashboard for Grafana, as JSON.

    Example:
      gpuserve export grafana config.yaml > dashboard.json
    """
    from gpuserve.export import rendering

    text = rendering.grafana_text(_load_config(config), ExportOptions(name=name))
    _write_files(out, {"dashboard.json": text})


def alerts(
    config: Config, name: Name = "", namespace: Namespace = "", plain: Plain = False, out: Out = None
) -> None:
    """Write alert rules, as a PrometheusRule or as a rule file of Prometheus.

    Examples:
      gpuserve export alerts config.yaml --namespace models > alerts.yaml
      gpuserve export alerts config.yaml --plain > rules.yaml
    """
    from gpuserve.export import rendering

    options = ExportOptions(name=name, namespace=namespace)
    if plain:
        _write_files(out, {"rules.yaml": rendering.rules_text(_load_config(config), options)})
        return
    _write_files(out, {"alerts.yaml": rendering.alerts_text(_load_config(config), options)})


def _load_config(config: str) -> Configuration:
    from gpuserve.config.load import load_file

    return load_file(config, {}, served_here=False)


def _write_files(out: str | None, files: ExportFiles) -> None:
    from gpuserve.export.rendering import write_files, write_stdout

    if out is None:
        write_stdout(*files.values())
        return
    write_files(out, files)
    sys.stderr.write(f"{len(files)} file{'s' if len(files) > 1 else ''} in {out}\n")

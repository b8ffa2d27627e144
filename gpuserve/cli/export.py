"""``gpuserve export``: manifests of a cluster, and what watches it there, from a config file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuserve.cli.exit_codes import help_text
from gpuserve.cli.export_options import export_options, with_pod_options

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.rendering import Files

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file that the pods will serve.")]
Name = Annotated[
    str,
    typer.Option(metavar="NAME", help="Name in the cluster; default that of the only model, or gpuserve."),
]
Namespace = Annotated[str, typer.Option(metavar="NAME", help="Default: the one in which they are applied.")]
Host = Annotated[
    str,
    typer.Option(metavar="NAME", help="Name with an address for each pod; default their headless Service."),
]
TlsSecret = Annotated[
    str, typer.Option(metavar="NAME", help="The Secret of the pods, where they speak TLS by it.")
]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="Folder for the files; default is stdout.")]


def export_app() -> typer.Typer:
    """``export`` and its verbs."""
    text = "Write manifests for Kubernetes or KServe, a balancer, a dashboard, alerts, from a config file."
    app = typer.Typer(name="export", help=text, no_args_is_help=True)
    for verb in (kubernetes, kserve, envoy, grafana, alerts):
        app.command(epilog=help_text())(verb)
    return app


@with_pod_options
def kubernetes(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a kustomize base, with overlays for surge, DaemonSet, KEDA and monitoring.

    One pod a GPU node. Every number is computed from the config, and a comment
    says how. The environment of this command is not looked at: pods have another.
    Without --out the objects of the base go to stdout.

    Examples:
      gpuserve export kubernetes config.yaml --image my/models:1 --out cluster
      kubectl apply --server-side -k cluster/base
      gpuserve export kubernetes config.yaml --image my/models:1 > cluster.yaml
    """
    from gpuserve.export import rendering
    from gpuserve.export.output import to_stdout

    options, configuration = export_options(flags), _load(config)
    if out is None:
        to_stdout(rendering.kubernetes_stream(configuration, options))
    else:
        _write(out, rendering.kubernetes(configuration, options))


@with_pod_options
def kserve(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a ServingRuntime and an InferenceService, for KServe in its Standard mode.

    Example:
      gpuserve export kserve config.yaml --image my/models:1 > kserve.yaml
    """
    from gpuserve.export import rendering

    options = export_options(flags)
    _put(out, "kserve.yaml", rendering.kserve_stream(_load(config), options))


def envoy(
    config: Config,
    name: Name = "",
    namespace: Namespace = "",
    host: Host = "",
    tls_secret: TlsSecret = "",
    out: Out = None,
) -> None:
    """Write the configuration of Envoy in front of the pods.

    It balances single requests, by the health of each pod, and repeats those
    that a dying pod has lost. With TLS there are more files than one.

    Examples:
      gpuserve export envoy config.yaml > envoy.yaml
      gpuserve export envoy config.yaml --host models.example --out /etc/envoy
    """
    from gpuserve.export import rendering
    from gpuserve.export.options import ExportOptions
    from gpuserve.export.output import to_stdout

    options = ExportOptions(name=name, namespace=namespace, tls_secret=tls_secret)
    files = rendering.envoy(_load(config), options, host)
    if out is not None:
        _write(out, files)
    elif len(files) > 1:
        raise typer.BadParameter("TLS takes more files than one, so give a folder", param_hint="--out")
    else:
        to_stdout(*files.values())


def grafana(config: Config, name: Name = "", out: Out = None) -> None:
    """Write a dashboard for Grafana, as JSON.

    Example:
      gpuserve export grafana config.yaml > dashboard.json
    """
    from gpuserve.export import rendering
    from gpuserve.export.options import ExportOptions

    _put(out, "dashboard.json", rendering.grafana_text(_load(config), ExportOptions(name=name)))


def alerts(config: Config, name: Name = "", namespace: Namespace = "", out: Out = None) -> None:
    """Write alert rules, as a PrometheusRule.

    Example:
      gpuserve export alerts config.yaml --namespace models > alerts.yaml
    """
    from gpuserve.export import rendering
    from gpuserve.export.options import ExportOptions

    options = ExportOptions(name=name, namespace=namespace)
    _put(out, "alerts.yaml", rendering.alerts_text(_load(config), options))


def _load(config: str) -> Configuration:
    from gpuserve.config.load import load_file

    return load_file(config, {}, served_here=False)


def _put(out: str | None, name: str, text: str) -> None:
    from gpuserve.export.output import to_stdout

    if out is None:
        to_stdout(text)
    else:
        _write(out, {name: text})


def _write(out: str, files: Files) -> None:
    from gpuserve.export.output import write

    write(out, files)
    sys.stderr.write(f"{len(files)} file{'s' if len(files) > 1 else ''} in {out}\n")

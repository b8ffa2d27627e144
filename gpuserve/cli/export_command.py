"""``gpuserve export``: files for clusters and machines, a balancer, a dashboard and alerts, from a config."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpuserve.cli.exit_codes import help_text
from gpuserve.cli.export.export_options import ExportOptions
from gpuserve.cli.option_types import keyword, option, with_options
from gpuserve.model.options import OptionRow, rows

if TYPE_CHECKING:
    from gpuserve.cli.export.rendering import ExportFiles
    from gpuserve.config.load import Configuration


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file that the pods serve.")]
Host = Annotated[
    str,
    option(None, "DNS name with an address for each pod; default their headless Service.", metavar="NAME"),
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


#: Words for values in ``--help``; other values are names, memory or integers.
_METAVARS: Final = {
    "image": "IMAGE", "gpu_resource": "RESOURCE", "gpu_product": "PRODUCT", "gpu_sharing": "MODE",
    "prometheus": "URL",
}  # fmt: skip


def _flag_of(row: OptionRow) -> inspect.Parameter:
    """Return the flag of an option; memory is given as a text without ``_nbytes`` in the name."""
    name, kind, option = row.name.removesuffix("_nbytes"), str if row.option.unit else row.hint, row.option
    more: dict[str, Any] = {"least": option.least} if kind is int else {}
    if kind is str:
        more["metavar"] = "MEMORY" if option.unit else _METAVARS.get(name, "NAME")
    return keyword(None, name, kind | None if row.has_none else kind, row.default, option.description, **more)


def _with_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that ends in ``**flags`` the flags of these ``ExportOptions``; without names, of all."""
    chosen = [one for name, one in rows(ExportOptions).items() if not names or name in names]
    return partial(with_options, options=[*map(_flag_of, chosen)])


def _export_options(flags: dict[str, Any]) -> ExportOptions:
    """Return the flags as ``ExportOptions``; raise BadParameter if an amount of memory is none."""
    from gpuserve.cli.export.pod_sizing import parse_nbytes

    given: dict[str, Any] = {}
    for name in rows(ExportOptions):
        value = flags.get(flag := name.removesuffix("_nbytes"))
        if value is not None and flag != name:
            try:
                value = parse_nbytes(value)
            except ValueError as error:
                hint = "--" + flag.replace("_", "-")
                raise typer.BadParameter(str(error), param_hint=hint) from None
        if flag in flags:
            given[name] = value
    return ExportOptions(**given)


@_with_flags()
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
    from gpuserve.cli.export import rendering

    options, configuration = _export_options(flags), _load_config(config)
    if out is None:
        _write_files(out, {"": rendering.kubernetes_stream(configuration, options)})
    else:
        _write_files(out, rendering.kubernetes_files(configuration, options))


@_with_flags()
def kserve(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a ServingRuntime and an InferenceService, for KServe in its Standard mode.

    Example:
      gpuserve export kserve config.yaml --image my/models:1 > kserve.yaml
    """
    from gpuserve.cli.export import rendering

    options = _export_options(flags)
    _write_files(out, {"kserve.yaml": rendering.kserve_stream(_load_config(config), options)})


@_with_flags("image", "name")
def compose(config: Config, mount: Mount = "", out: Folder = "compose", **flags: Any) -> None:
    """Write a server with Prometheus, Grafana, dashboard and alerts, for Docker Compose.

    The files are for one machine. The folder of the config is mounted, so the image needs
    gpuserve and the packages that the models import, and no models.

    Example:
      gpuserve export compose config.yaml --image my/gpuserve:1 --out compose
      docker compose --project-directory compose up
    """
    from gpuserve.cli.export import rendering

    mount = mount or os.path.relpath(os.path.dirname(os.path.abspath(config)), out)
    _write_files(out, rendering.compose_files(_load_config(config), _export_options(flags), config, mount))


@_with_flags("name")
def systemd(config: Config, user: User = "", out: Out = None, **flags: Any) -> None:
    """Write a service and a socket unit for systemd, on one machine.

    The socket unit keeps the ports: connections wait while the service restarts, so a restart
    or an upgrade refuses no client. The service runs the gpuserve of this command.

    Examples:
      gpuserve export systemd config.yaml --out /etc/systemd/system
      systemctl daemon-reload
      systemctl enable --now gpuserve.socket gpuserve.service
    """
    from gpuserve.cli.export import rendering

    files = rendering.systemd_files(_load_config(config), _export_options(flags), config, user)
    if out is None:
        files = {"": "\n".join(f"# {file}\n{text}" for file, text in files.items())}
    _write_files(out, files)


@_with_flags("name", "namespace", "tls_secret")
def envoy(config: Config, host: Host = "", out: Out = None, **flags: Any) -> None:
    """Write the configuration of Envoy in front of the pods.

    Envoy balances single requests by the health of each pod, and retries requests that a
    dying pod has lost. With TLS there are several files.

    Examples:
      gpuserve export envoy config.yaml > envoy.yaml
      gpuserve export envoy config.yaml --host models.example --out /etc/envoy
    """
    from gpuserve.cli.export import rendering

    files = rendering.envoy_config_files(_load_config(config), _export_options(flags), host)
    if out is None and len(files) > 1:
        raise typer.BadParameter("expected a folder: with TLS there are several files", param_hint="--out")
    _write_files(out, files)


@_with_flags("name")
def grafana(config: Config, out: Out = None, **flags: Any) -> None:
    """Write a dashboard for Grafana, as JSON.

    Example:
      gpuserve export grafana config.yaml > dashboard.json
    """
    from gpuserve.cli.export import rendering

    text = rendering.grafana_text(_load_config(config), _export_options(flags))
    _write_files(out, {"dashboard.json": text})


@_with_flags("name", "namespace")
def alerts(config: Config, plain: Plain = False, out: Out = None, **flags: Any) -> None:
    """Write alert rules, as a PrometheusRule or as a rule file of Prometheus.

    Examples:
      gpuserve export alerts config.yaml --namespace models > alerts.yaml
      gpuserve export alerts config.yaml --plain > rules.yaml
    """
    from gpuserve.cli.export import rendering

    text = rendering.alerts_text(_load_config(config), _export_options(flags), plain=plain)
    _write_files(out, {"rules.yaml" if plain else "alerts.yaml": text})


def _load_config(config: str) -> Configuration:
    from gpuserve.config.load import load_file

    return load_file(config, {}, served_here=False)


def _write_files(out: str | None, files: ExportFiles) -> None:
    from gpuserve.cli.export.rendering import write_files, write_stdout

    if out is None:
        write_stdout(*files.values())
        return
    write_files(out, files)
    sys.stderr.write(f"{len(files)} file{'s' if len(files) > 1 else ''} in {out}\n")

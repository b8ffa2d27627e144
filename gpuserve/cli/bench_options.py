"""The options of ``gpuserve bench``, each by its type."""

from __future__ import annotations

from typing import Annotated

import typer

_LOAD, _DATA, _SERVER, _REPORT = "Load", "Requests", "Server", "Report"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
Url = Annotated[
    str | None,
    typer.Option(help="[grpc|grpcs|http|https://]host[:port]. Default localhost.", rich_help_panel=_SERVER),
]
Protocol = Annotated[
    str | None,
    typer.Option(
        metavar="grpc|http", help="Where --url does not say. Default grpc.", rich_help_panel=_SERVER
    ),
]
Version = Annotated[
    str, typer.Option("--model-version", help="Default: the server's choice.", rich_help_panel=_SERVER)
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header", metavar="NAME: VALUE", help="On every request; repeatable.", rich_help_panel=_SERVER
    ),
]
TlsCa = Annotated[
    str, typer.Option(metavar="FILE", help="PEM of the server's authority.", rich_help_panel=_SERVER)
]
TlsCert = Annotated[
    str, typer.Option(metavar="FILE", help="PEM of the client's certificate.", rich_help_panel=_SERVER)
]
TlsKey = Annotated[str, typer.Option(metavar="FILE", help="PEM of its key.", rich_help_panel=_SERVER)]
TlsNoVerify = Annotated[
    bool,
    typer.Option("--tls-no-verify", help="HTTP: take any certificate.", rich_help_panel=_SERVER),
]
TimeoutS = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Of each request.", rich_help_panel=_SERVER)
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        metavar="LEVELS",
        help="Requests in flight (closed loop): 16, 1,2,8, 1:64:x2 or 8:64:8. Default 1:64:x2.",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        metavar="LEVELS",
        help="Requests a second (open loop), in the same forms. Latency counts from when each was due.",
        rich_help_panel=_LOAD,
    ),
]
Arrivals = Annotated[
    str, typer.Option(metavar="poisson|constant", help="How a rate is spread.", rich_help_panel=_LOAD)
]
DurationS = Annotated[
    float, typer.Option("--duration", metavar="SECONDS", help="Of each level.", rich_help_panel=_LOAD)
]
WarmupS = Annotated[
    float,
    typer.Option(
        "--warmup", metavar="SECONDS", help="Before each level, not counted.", rich_help_panel=_LOAD
    ),
]
Stable = Annotated[
    bool,
    typer.Option("--stable", help="End a level when three seconds agree to 10 %.", rich_help_panel=_LOAD),
]
Connections = Annotated[
    int | None,
    typer.Option(
        help="Default: gRPC one for 32 in flight (4 for a rate), HTTP one for each (128 for a rate).",
        min=1,
        rich_help_panel=_LOAD,
    ),
]
MaxInFlight = Annotated[
    int, typer.Option(help="Bound of an open loop; more wait here.", min=1, rich_help_panel=_LOAD)
]
Processes = Annotated[
    int | None,
    typer.Option(help="That send. Default half of the cores, at most 4.", min=1, rich_help_panel=_LOAD),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME:DIMS", help="x:3,224,224, without the batch axis.", rich_help_panel=_DATA
    ),
]
BatchSize = Annotated[int, typer.Option(help="Rows of each request.", rich_help_panel=_DATA)]
Data = Annotated[
    str,
    typer.Option(
        metavar="random|zero|FILE", help="What inputs hold; FILE is .json or .npz.", rich_help_panel=_DATA
    ),
]
StringLength = Annotated[int, typer.Option(help="Of random BYTES elements.", min=0, rich_help_panel=_DATA)]
SharedMemory = Annotated[
    str, typer.Option(metavar="none|system|cuda", help="Where tensors lie.", rich_help_panel=_DATA)
]
Seed = Annotated[int, typer.Option(help="Of random data and arrivals.", min=0, rich_help_panel=_DATA)]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="A report: .md, .csv, .json or .html; repeatable.",
        rich_help_panel=_REPORT,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="An earlier .json report: shows ratios to it.", rich_help_panel=_REPORT
    ),
]

"""The options of ``gpuserve tune``, each by its type."""

from __future__ import annotations

from typing import Annotated

import typer

_SEARCH, _VALUES, _LOAD = "Search", "Values to try (lists such as 1,2,4; one value is fixed)", "Load"

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config file; it is not changed.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Tune this one; repeatable. Default each.", rich_help_panel=_SEARCH),
]
LatencyLimit = Annotated[
    str | None,
    typer.Option(metavar="p99=50ms", help="mean, p50, p90, p95, p99, p99.9 or max.", rich_help_panel=_SEARCH),
]
Trials = Annotated[
    int, typer.Option(help="Most settings that are tried for a model.", min=1, rich_help_panel=_SEARCH)
]
TimeBudget = Annotated[
    str, typer.Option(metavar="TIME", help="For all models: 90s, 10m, 1h.", rich_help_panel=_SEARCH)
]
Output = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the config with the best settings.", rich_help_panel=_SEARCH),
]
MaxBatchSizes = Annotated[str | None, typer.Option(metavar="LIST", rich_help_panel=_VALUES)]
DelaysUs = Annotated[
    str | None, typer.Option(metavar="LIST", help="max_queue_delay_us.", rich_help_panel=_VALUES)
]
Instances = Annotated[
    str | None, typer.Option(metavar="LIST", help="The count of instances.", rich_help_panel=_VALUES)
]
Prefetch = Annotated[str | None, typer.Option(metavar="LIST", rich_help_panel=_VALUES)]
Concurrency = Annotated[
    str, typer.Option(metavar="LEVELS", help="Requests in flight, ascending.", rich_help_panel=_LOAD)
]
DurationS = Annotated[
    float, typer.Option("--duration", metavar="SECONDS", help="Of each level.", rich_help_panel=_LOAD)
]
WarmupS = Annotated[
    float, typer.Option("--warmup", metavar="SECONDS", help="Before each level.", rich_help_panel=_LOAD)
]
Protocol = Annotated[str, typer.Option(metavar="grpc|http", rich_help_panel=_LOAD)]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME:DIMS", help="x:3,224,224, without the batch axis.", rich_help_panel=_LOAD
    ),
]
BatchSize = Annotated[int, typer.Option(help="Rows of each request.", min=1, rich_help_panel=_LOAD)]
Data = Annotated[
    str,
    typer.Option(metavar="random|zero|FILE", help="What inputs hold; as for bench.", rich_help_panel=_LOAD),
]

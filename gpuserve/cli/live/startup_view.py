"""Progress of a start (a table by rich on a terminal, else log lines), addresses and a command to try."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from gpuserve.config.settings import logs
from gpuserve.config.settings.values import TOKEN_HEADER
from gpuserve.model.example_values import example_element, media_type_of
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.processes.lifecycle import ServerObserver
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, element_count

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from gpuserve.config.settings.server import ServerSettings


logger = logging.getLogger(__name__)

_LOADING: Final = "LOADING"
_READY: Final = "READY"
#: States of a start. The supervisor logs all other states itself, with their reason.
_STARTING: Final = frozenset({_LOADING, _READY})
_REFRESHES_PER_SECOND: Final = 8
#: The last line of a start.
CLOSING_TEXT: Final = "Ctrl-C stops the server."
RELOADING_TEXT: Final = "Watching files: a model is reloaded when its files change."
_TITLES: Final = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics", "health": "health"}


class LogView(ServerObserver):
    """An observer that logs each change of an instance, and shows the addresses at the end."""

    def __init__(self, show_ready: Callable[[dict[str, str]], None], clock: Callable[[], float]) -> None:
        self._show_ready = show_ready
        self._clock = clock
        #: The models that have been ready.
        self.ready_models: set[str] = set()
        self._loading_since: dict[tuple[str, str], float] = {}

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        text, now = _phase_or_state(state, phase), self._clock()
        if state == _LOADING:
            self._loading_since.setdefault((model, instance), now)
        else:
            since = self._loading_since.pop((model, instance), now)
        if state == _READY:
            self.ready_models.add(model)
            text += f" after {now - since:.1f} s"
        extra = {"model": model, "instance": instance, "device": device}
        logger.log(logging.INFO if state in _STARTING else logging.DEBUG, "%s", text, extra=extra)

    def server_ready(self, addresses: dict[str, str]) -> None:
        self._show_ready(addresses)


@dataclass
class _InstanceRow:
    model: str
    instance: str
    device: str
    phase: str
    since: float
    seconds: float | None = None  # None while the instance loads


class TableView(ServerObserver):
    """An observer that draws a live table until the server is ready, and logs changes from then on."""

    def __init__(self, later: LogView, clock: Callable[[], float]) -> None:
        self._later = later
        self._clock = clock
        self._rows: dict[tuple[str, str], _InstanceRow] = {}
        self._live: Live | None = None

    def open(self) -> None:
        """Start drawing on stderr; text that others write there appears above the table."""
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(stderr=True), get_renderable=self.table,
            refresh_per_second=_REFRESHES_PER_SECOND, redirect_stdout=False,
        )  # fmt: skip
        self._live.start()

    def close(self) -> None:
        """Draw for the last time; the table stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        if self._live is None:
            self._later.instance_changed(model, instance, device, state, phase)
            return
        now = self._clock()
        row = self._rows.setdefault((model, instance), _InstanceRow(model, instance, device, "", now))
        row.phase = _phase_or_state(state, phase)
        row.seconds = None
        if state == _READY:
            row.seconds = now - row.since
            self._later.ready_models.add(model)

    def server_ready(self, addresses: dict[str, str]) -> None:
        self.close()
        self._later.server_ready(addresses)

    def table(self) -> Table:
        """Return the table of all instances. Called from rich's thread as well."""
        from rich.table import Table

        table = Table("Model", "Instance", "Device", "Phase", box=None, pad_edge=False)
        table.add_column("Seconds", justify="right")
        for row in list(self._rows.values()):
            seconds = self._clock() - row.since if row.seconds is None else row.seconds
            style = "green" if row.seconds is not None else ""
            table.add_row(row.model, row.instance, row.device, row.phase, f"{seconds:.1f}", style=style)
        return table


@contextlib.contextmanager
def startup_view(
    settings: ServerSettings, models: Sequence[ModelSpec], stream: TextIO, closing: str = CLOSING_TEXT
) -> Iterator[ServerObserver]:
    """Yield the observer for a stream: a table on a terminal unless the log is JSON. ``closing`` is the last
    line that is printed when the server is ready.
    """

    def show_ready(addresses: dict[str, str]) -> None:
        if settings.log_format == "json":
            shown = ", ".join(f"{_TITLES[role]} {where}" for role, where in addresses.items())
            logger.info("ready: %s", shown)
        else:
            ready = [one for one in models if one.name in lines.ready_models]
            logs.write_lines(ready_text(addresses, ready or models, closing, settings))

    lines = LogView(show_ready, time.monotonic)
    if settings.log_format == "json" or not stream.isatty():
        yield lines
        return
    table = TableView(lines, time.monotonic)
    table.open()
    try:
        yield table
    finally:
        table.close()


def ready_text(
    addresses: dict[str, str],
    models: Sequence[ModelSpec],
    closing: str = CLOSING_TEXT,
    settings: ServerSettings | None = None,
) -> str:
    """Return the addresses of the server, and a command that sends a request to its first model."""
    lines = [f"  {_TITLES[role]:<8} {where}" for role, where in addresses.items()]
    access = "" if settings is None else _curl_access(settings)
    command = client_command(addresses, models[0], access) if models and access is not None else None
    if command is not None:
        with_token = f", with the access token as {_TOKEN}" if _TOKEN in command else ""
        lines += [f"Try it from another shell{with_token}:", f"  {command}"]
    return "\n".join(["Ready.", *lines, closing, ""])


def _curl_access(settings: ServerSettings) -> str | None:
    """Return curl's options for the server's certificate and for a token, or None if curl needs more: a
    certificate of its own.
    """
    words = []
    if settings.tls_certfile is not None and "http" in settings.tls_ports:
        if settings.tls_client_ca is not None:
            return None
        words += ["--cacert", shlex.quote(settings.tls_certfile)]
    headers = [one.header for one in settings.access_rules if "inference" in one.groups]
    if "inference" in settings.restricted_endpoints:
        headers.insert(0, TOKEN_HEADER)
    if headers:
        words += ["-H", f'"{headers[0]}: {_TOKEN}"']
    return "".join(f" {one}" for one in words)


def _phase_or_state(state: str, phase: str) -> str:
    return phase if phase and state != _READY else state.lower()


#: The variable of the user's shell in a command that needs an access token.
_TOKEN: Final = "$TOKEN"
#: A request with more elements is built by Python instead of being written out for curl.
_MAX_ELEMENTS: Final = 32
#: Datatypes whose elements JSON tensors do not carry.
_NOT_IN_JSON: Final = frozenset({"FP16", "BF16"})
#: The parameters of a sequence of one request.
_SEQUENCE: Final = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
_NUMPY_NAMES: Final = {
    "BOOL": "bool", "FP16": "np.float16", "FP32": "np.float32", "FP64": "np.float64",
    "BF16": "ml_dtypes.bfloat16",
}  # fmt: skip


def client_command(addresses: Mapping[str, str], model: ModelSpec, access: str = "") -> str | None:
    """Return a command that sends a model one request, by curl or Python; None without an address. If curl
    needs options for ``access``, there is none by Python.
    """
    http, grpc = addresses.get("http"), addresses.get("grpc")
    if model.openai:  # only the worker knows which endpoints a model has
        chat = {"model": model.name, "messages": [{"role": "user", "content": "hello"}]}
        return http and f"curl -s{access} {http}/v1/chat/completions -d {shlex.quote(json.dumps(chat))}"
    batch = [1] if model.max_batch_size else []
    tensors = [
        (one, batch + [1 if dim == -1 else dim for dim in one.shape])
        for one in model.inputs
        if not one.optional
    ]
    url = f"{http}/v2/models/{model.name}"
    if http and sum(element_count(shape) for _, shape in tensors) <= _MAX_ELEMENTS:
        if not model.decoupled and any(_is_file(spec) for spec, _ in tensors):
            return f"curl -s{access} {url}/infer{_form(model, tensors)}"
        if not any(spec.datatype in _NOT_IN_JSON for spec, _ in tensors):
            verb, option = ("generate_stream", "-sN") if model.decoupled else ("infer", "-s")
            body = json.dumps(_json_request(model, tensors), ensure_ascii=False)
            return f"curl {option}{access} {url}/{verb} -d {shlex.quote(body)}"
    address = grpc or (None if model.decoupled else http)  # over HTTP only curl prints a stream
    return None if access or address is None else _python_command(address, model, tensors)


def _is_file(spec: TensorSpec) -> bool:
    return media_type_of(spec).startswith(("image/", "audio/"))


def _form(model: ModelSpec, tensors: Sequence[tuple[TensorSpec, list[int]]]) -> str:
    """Return curl's options for a model that takes files; an answer that is one file becomes a file."""
    form = ""
    for spec, shape in tensors:
        value = example_element(spec)
        if _is_file(spec):
            value = f"@{spec.name}.{'jpg' if media_type_of(spec).startswith('image/') else 'wav'}"
        elif spec.datatype != BYTES:
            value = json.dumps([value] * element_count(shape))
        form += f" -F {shlex.quote(f'{spec.name}={value}')}"
    if len(model.outputs) == 1 and _is_file(model.outputs[0]):
        is_image = media_type_of(model.outputs[0]).startswith("image/")
        kind, name = ("image/png", "answer.png") if is_image else ("audio/wav", "answer.wav")
        form += f" -H 'accept: {kind}' -o {name}"
    return form


def _json_request(model: ModelSpec, tensors: Sequence[tuple[TensorSpec, list[int]]]) -> dict[str, Any]:
    data = [[example_element(spec)] * element_count(shape) for spec, shape in tensors]
    if model.decoupled:
        values = {
            spec.name: one if len(one) > 1 else one[0] for (spec, _), one in zip(tensors, data, strict=True)
        }
        return values | (_SEQUENCE if model.in_sequences else {})
    inputs = [
        {"name": spec.name, "shape": shape, "datatype": spec.datatype, "data": one}
        for (spec, shape), one in zip(tensors, data, strict=True)
    ]
    return {"inputs": inputs} | ({"parameters": _SEQUENCE} if model.in_sequences else {})


def _python_command(address: str, model: ModelSpec, tensors: Sequence[tuple[TensorSpec, list[int]]]) -> str:
    kind, shown = ("DecoupledModelClient", ", sep='\\n'") if model.decoupled else ("ModelClient", "")
    url = address if "://" in address else f"grpc://{address}"
    inputs = ", ".join(f"{spec.name!r}: {_array(spec, shape)}" for spec, shape in tensors)
    method = "infer_batch" if model.max_batch_size else "infer_sample"
    more = f"parameters={_SEQUENCE}, " if model.in_sequences else ""
    statements = [
        f"import ml_dtypes, numpy as np; from gpuserve.client import {kind}",
        f"client = {kind}({url!r}, {model.name!r})",
        f"print({'*' if shown else ''}client.{method}({more}**{{{inputs}}}){shown})",
        "client.close()",
    ]
    return f"python3 -c {shlex.quote('; '.join(statements))}"


def _array(spec: TensorSpec, shape: list[int]) -> str:
    if spec.datatype == BYTES:
        return f"np.full({shape}, {example_element(spec)!r}.encode(), dtype=object)"
    return f"np.ones({shape}, {_NUMPY_NAMES.get(spec.datatype, f'np.{spec.datatype.lower()}')})"

"""Rules between several keys of a configuration, for plain data in which other mistakes are ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gpuserve.backends.registry import FILE_SUFFIXES, VLLM, is_model_path
from gpuserve.config.settings.checks import NO_FILE, lacks_trace_file
from gpuserve.config.settings.server import EXPLICIT, NO_CONTROL, ServerSettings, TraceSettings
from gpuserve.config.settings.tls import FILE_KEYS, tls_pairing_problem
from gpuserve.config.settings.values import NO_TOKEN, ingress_processes_problem
from gpuserve.config.yaml_document import Path
from gpuserve.devices.names import CPU
from gpuserve.model import openai_declaration as openai
from gpuserve.model.declaration import GPU, MEMORIES, array_library, device_problem, memory_problem
from gpuserve.model.rules import batching_faults, is_int, mapping, ragged_faults
from gpuserve.model.spec import CUPY
from gpuserve_worker.protocol.tensor import datatype_of

_PORT_KEYS: Final = ("http_port", "grpc_port", "metrics_port", "health_port")
#: The keys of an ensemble. All other keys of a model concern its callable and its queue.
_ENSEMBLE_KEYS: Final = frozenset(
    {"name", "version", "inputs", "outputs", "max_batch_size", "ensemble", "decoupled"}
)


class Violation(NamedTuple):
    """A broken rule, with the path of the value that breaks it."""

    path: Path
    text: str


def entries(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return the mappings in a list with their positions; [] for any other value."""
    listed = value if isinstance(value, list) else []
    return [(index, entry) for index, entry in enumerate(listed) if isinstance(entry, dict)]


def violations(data: Any, others: Collection[str] = ()) -> Iterator[Violation]:
    """Yield the broken rules in plain data; ``others`` are models that are declared elsewhere."""
    server = mapping(mapping(data).get("server"))
    yield from _ports(server)
    if server.get("restricted_endpoints") and server.get("access_token") is None:
        yield Violation(("server", "restricted_endpoints"), NO_TOKEN)
    if tls_problem := tls_pairing_problem(*(server.get(key) for key in FILE_KEYS)):
        yield Violation(("server", tls_problem[0]), tls_problem[1])
    if problem := ingress_processes_problem(server.get("ingress_processes"), server.get("transport")):
        yield Violation(("server", "ingress_processes"), problem)
    trace, defaults = mapping(server.get("trace")), TraceSettings()
    if lacks_trace_file(*(trace.get(key, getattr(defaults, key)) for key in ("mode", "level", "file"))):
        yield Violation(("server", "trace"), NO_FILE)
    models = entries(mapping(data).get("models"))
    yield from _repeated_models(models)
    yield from _load_at_start(server, models, others)
    for index, model in models:
        path: Path = ("models", index)
        yield from _ensemble_keys(model, path)
        for place, text in (*batching_faults(model), *ragged_faults(model)):
            yield Violation((*path, *place), text)
        if model.get("idle_timeout_s") and not model.get("on_demand"):
            text = "idle_timeout_s has no effect without on_demand: true"
            yield Violation((*path, "idle_timeout_s"), text)
        yield from _openai(model, path)
        yield from _runtime(model, path)
        yield from _answers(model, path)
        yield from _memories(model, path)
        yield from _devices(model, path)
        for key in ("inputs", "outputs"):
            yield from _repeated_tensors(entries(model.get(key)), (*path, key))


def _ensemble_keys(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield models with neither a callable nor steps, and ensembles with keys of a callable."""
    if model.get("ensemble") is None:
        if model.get("callable") is None:
            yield Violation(path, f"missing key 'callable', or 'ensemble', in models[{path[-1]}]")
        return
    for key in ("inputs", "outputs"):
        if key not in model:
            yield Violation(path, f"missing key {key!r} in models[{path[-1]}]")
    for key, value in model.items():
        if key not in _ENSEMBLE_KEYS and value is not None:
            text = f"{key} does not go with ensemble: it is for the models of the steps"
            yield Violation((*path, key), text)


def _openai(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield keys that do not go with ``openai: true``."""
    if not openai.is_openai(model):
        return
    for key in ("inputs", "outputs"):
        if problem := openai.tensors_problem(key, model.get(key)):
            yield Violation((*path, key), problem)
    if model.get("decoupled") is False:
        yield Violation((*path, "decoupled"), openai.NOT_DECOUPLED)
    if model.get("sequence_batching") is not None:
        yield Violation((*path, "sequence_batching"), "sequence_batching does not go with openai")


def _runtime(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield a runtime of a model that is no folder, and names for OpenAI's clients who are not served."""
    if model.get("runtime") is not None:
        given = str(model.get("callable"))
        if not is_model_path(given) or given.lower().endswith(FILE_SUFFIXES):
            text = f"runtime goes with a folder of Hugging Face, and the callable is {given!r}"
            yield Violation((*path, "runtime"), text)
        elif model["runtime"] == VLLM and not openai.is_openai(model):
            yield Violation((*path, "runtime"), "runtime vllm serves OpenAI's clients: expected openai: true")
    if model.get("openai_names") and not openai.is_openai(model):
        yield Violation((*path, "openai_names"), "openai_names has no effect without openai: true")


def _ports(server: Mapping[str, Any]) -> Iterator[Violation]:
    defaults = ServerSettings()
    first_use: dict[int, str] = {}
    for key in sorted(_PORT_KEYS, key=lambda key: key in server):  # report a given port, not a default
        port = server.get(key, getattr(defaults, key))
        if not is_int(port) or port == 0:
            continue
        other = first_use.setdefault(port, key)
        if other != key:
            default = "" if other in server else " (its default)"
            text = f"port {port} is already that of {other}{default}; give {key} another"
            yield Violation(("server", key), text)


def _repeated_models(models: list[tuple[int, dict[str, Any]]]) -> Iterator[Violation]:
    """Yield versions that are declared twice, and names that differ only in case, which some ignore."""
    first_name: dict[str, tuple[int, str]] = {}
    first_use: dict[tuple[str, Any], int] = {}
    for index, entry in models:
        name, version = entry.get("name"), entry.get("version", 1)
        if not isinstance(name, str) or not is_int(version):
            continue
        path = ("models", index, "name")
        first, earlier = first_name.setdefault(name.casefold(), (index, name))
        text = f"model {name!r} is already declared in models"
        if earlier != name:
            yield Violation(path, f"{text}[{first}] as {earlier!r}: names must differ in more than case")
        elif (same := first_use.setdefault((name, version), index)) != index:
            yield Violation(path, f"{text}[{same}]; another entry of this name needs another version")


def _repeated_tensors(tensors: list[tuple[int, dict[str, Any]]], path: Path) -> Iterator[Violation]:
    first_use: dict[str, int] = {}
    for index, entry in tensors:
        name = entry.get("name")
        if isinstance(name, str) and (first := first_use.setdefault(name, index)) != index:
            text = f"tensor {name!r} is already declared in {path[-1]}[{first}]"
            yield Violation((*path, index, "name"), text)


def _load_at_start(
    server: Mapping[str, Any], models: list[tuple[int, dict[str, Any]]], others: Collection[str]
) -> Iterator[Violation]:
    path, names = ("server", "load_at_start"), server.get("load_at_start")
    if not isinstance(names, list | tuple):
        return
    if server.get("model_control", NO_CONTROL) != EXPLICIT:
        yield Violation(path, "load_at_start needs model_control: explicit; without it every model is loaded")
    known = [*others, *(entry.get("name") for _, entry in models)]
    for name in names:
        if isinstance(name, str) and name not in known:
            yield Violation(path, f"load_at_start names {name!r}, which is no model of this server")


def _answers(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield options that do not go with ``decoupled``."""
    if model.get("decoupled") is not True:
        return
    if model.get("response_cache") is True:
        yield Violation((*path, "response_cache"), "response_cache does not go with decoupled")
    if model.get("retry_on_worker_death") is True and not model.get("max_active"):
        text = "retry_on_worker_death does not go with decoupled: some responses may have been sent already"
        yield Violation((*path, "retry_on_worker_death"), text)


def _memories(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield inputs whose memory does not go with their dtype, with ``array`` or with an ensemble."""
    for index, entry in entries(model.get("inputs")):
        if entry.get("memory") not in MEMORIES:  # reported by the schema
            continue
        try:
            datatype = datatype_of(entry.get("dtype"))
        except ValueError:
            continue
        problem = memory_problem(entry["memory"], datatype, model.get("array"))
        if model.get("ensemble") is not None:
            problem = "memory does not go with ensemble: it is for the models of the steps"
        if problem is not None:
            yield Violation((*path, "inputs", index, "memory"), problem)


def _devices(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield the first instance on the CPU if inputs are arrays that exist only on a GPU."""
    if model.get("ensemble") is not None:
        return
    inputs = entries(model.get("inputs"))
    array = array_library(model.get("array"), [entry.get("memory") for _, entry in inputs])
    for key, device in _declared_devices(model, inputs):
        if problem := device_problem(array, [device]):
            yield Violation((*path, *key), problem)
            return


def _declared_devices(
    model: dict[str, Any], inputs: list[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[Path, Any]]:
    """Yield each device with its path; without instances the CPU, at the key that needs a GPU."""
    if "instances" in model:
        for index, entry in entries(model["instances"]):
            yield ("instances", index, *(["device"] if "device" in entry else [])), entry.get("device", CPU)
        return
    on_gpu = [index for index, entry in inputs if entry.get("memory") == GPU]
    yield ("array",) if model.get("array") == CUPY else ("inputs", *on_gpu[:1], "memory"), CPU

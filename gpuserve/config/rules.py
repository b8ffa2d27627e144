"""Rules between several keys of a configuration, for plain data in which other mistakes are ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.backends.registry import FILE_SUFFIXES, VLLM, is_model_path
from gpuserve.config.settings.checks import server_faults
from gpuserve.config.settings.server import EXPLICIT, NO_CONTROL, ServerSettings
from gpuserve.config.yaml_document import Path
from gpuserve.devices.names import CPU
from gpuserve.model import openai_declaration as openai
from gpuserve.model.declaration import GPU, MEMORIES, array_library, device_problem, memory_problem
from gpuserve.model.rules import Violation, batching_faults, is_int, mapping, ragged_faults
from gpuserve.model.spec import CUPY
from gpuserve_worker.protocol.tensor import datatype_of

_PORT_KEYS: Final = ("http_port", "grpc_port", "metrics_port", "health_port")
#: The keys of an ensemble. All other keys of a model concern its callable and its queue.
_ENSEMBLE_KEYS: Final = frozenset(
    {"name", "version", "inputs", "outputs", "max_batch_size", "ensemble", "decoupled"}
)
# fmt: off
#: Rules between keys of a model: the key at fault, whether the model breaks the rule, and the sentence.
_MODEL_RULES: Final[Sequence[tuple[str, Callable[[Mapping[str, Any]], Any], str]]] = (
    ("idle_timeout_s", lambda one: one.get("idle_timeout_s") and not one.get("on_demand"),
        "idle_timeout_s has no effect without on_demand: true"),
    ("decoupled", lambda one: openai.is_openai(one) and one.get("decoupled") is False, openai.NOT_DECOUPLED),
    ("sequence_batching", lambda one: openai.is_openai(one) and one.get("sequence_batching") is not None,
        "sequence_batching does not go with openai"),
    ("openai_names", lambda one: one.get("openai_names") and not openai.is_openai(one),
        "openai_names has no effect without openai: true"),
    ("response_cache", lambda one: one.get("response_cache") is one.get("decoupled") is True,
        "response_cache does not go with decoupled"),
    ("retry_on_worker_death", lambda one: one.get("retry_on_worker_death") is one.get("decoupled") is True
        and not one.get("max_active"),
        "retry_on_worker_death does not go with decoupled: some responses may have been sent already"),
)
# fmt: on


def entries(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return the mappings in a list with their positions; [] for any other value."""
    listed = value if isinstance(value, list) else []
    return [(index, entry) for index, entry in enumerate(listed) if isinstance(entry, dict)]


def violations(data: Any, others: Collection[str] = ()) -> Iterator[Violation]:
    """Yield the broken rules in plain data; ``others`` are models that are declared elsewhere."""
    server = mapping(mapping(data).get("server"))
    yield from _ports(server)
    yield from (Violation(("server", key), text) for key, text in server_faults(server))
    models = entries(mapping(data).get("models"))
    yield from _repeated_models(models)
    yield from _load_at_start(server, models, others)
    for index, model in models:
        path: Path = ("models", index)
        yield from _ensemble_keys(model, path)
        for place, text in (*batching_faults(model), *ragged_faults(model)):
            yield Violation((*path, *place), text)
        for key, is_broken, text in _MODEL_RULES:
            if is_broken(model):
                yield Violation((*path, key), text)
        for key in ("inputs", "outputs") if openai.is_openai(model) else ():
            if problem := openai.tensors_problem(key, model.get(key)):
                yield Violation((*path, key), problem)
        yield from _runtime(model, path)
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


def _runtime(model: dict[str, Any], path: Path) -> Iterator[Violation]:
    """Yield a runtime of a model that is no folder, or has no clients of the runtime."""
    if model.get("runtime") is None:
        return
    given = str(model.get("callable"))
    if not is_model_path(given) or given.lower().endswith(FILE_SUFFIXES):
        text = f"runtime goes with a folder of Hugging Face, and the callable is {given!r}"
        yield Violation((*path, "runtime"), text)
    elif model["runtime"] == VLLM and not openai.is_openai(model):
        yield Violation((*path, "runtime"), "runtime vllm serves OpenAI's clients: expected openai: true")


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
    on_gpu = [index for index, entry in inputs if entry.get("memory") == GPU]
    # Without instances there is one on the CPU: the fault is at the key that needs a GPU.
    needing: Path = ("array",) if model.get("array") == CUPY else ("inputs", *on_gpu[:1], "memory")
    devices: list[tuple[Path, Any]] = [(needing, CPU)]
    if "instances" in model:
        devices = [
            (("instances", index, *(["device"] if "device" in one else [])), one.get("device", CPU))
            for index, one in entries(model["instances"])
        ]
    for place, device in devices:
        if problem := device_problem(array, [device]):
            yield Violation((*path, *place), problem)
            return

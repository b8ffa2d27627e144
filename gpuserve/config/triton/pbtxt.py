"""config.pbtxt: the text with positions, the treatment of every field, and the entry under construction.

Protobuf's own reader turns the text into a ``ModelConfig`` but keeps no positions, so a second pass finds the
position of every field and value. A table says of every field whether it is honoured, has no effect, or is
refused with an alternative. A test compares the tables with the descriptor of the message, so that a field of
a later Triton is not ignored silently.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.yaml_document import Path, Span
from gpuserve.core.suggestions import nearest
from gpuserve.model.options import rows
from gpuserve.model.spec import BatchingSpec, PolicySpec, QueueSpec, SequenceBatching

_START: Final = Span(1, 1, 1)
_ENDS: Final = frozenset({"}", ">"})
_BETWEEN: Final = frozenset({",", ";"})
_QUOTES: Final = frozenset({'"', "'"})
#: Protobuf begins its messages with the position, and sometimes with the line.
_HEAD: Final = re.compile(r"^\d+:\d+ : (?:'.*': )?", re.DOTALL)
_NO_FIELD: Final = re.compile(
    r'Message type "inference\.(?P<message>[\w.]+)" has no field named "(?P<name>\w+)"'
)
_NO_VALUE: Final = re.compile(r'Enum type "inference\.(?P<enum>[\w.]+)" has no value named (?P<name>\w+)')


class PbtxtError(Exception):
    """A text that is no ``ModelConfig``, with the expected syntax and the position."""

    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.span = span


class _Places(NamedTuple):
    """The positions of a field: its name, and its value, whose first token is ``text``."""

    name: Span
    value: Span
    text: str = ""


@dataclass(frozen=True)
class Pbtxt:
    """A parsed config.pbtxt. Paths have names of fields, then numbers or keys of repeated fields and maps."""

    message: Any
    lines: Sequence[str]
    places: Mapping[Path, _Places]

    def has(self, *path: str | int) -> bool:
        """Return whether the text names the field at a path."""
        return path in self.places

    def span(self, path: Path, *, at_name: bool = False) -> Span:
        """Return the position of the value at a path, or of its nearest ancestor in the text."""
        while path and path not in self.places:
            path = path[:-1]
        found = self.places.get(path)
        return _START if found is None else found.name if at_name else found.value

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


def parse(text: str) -> Pbtxt:
    lines = text.split("\n")
    message = pb.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        word = re.match(r"[\w.-]+", lines[line - 1][column - 1 :] if line <= len(lines) else "")
        span = Span(line, column, len(word[0]) if word else 1)
        raise PbtxtError(_expected(str(error)), span) from None
    return Pbtxt(message, lines, _Walk(lines).message(pb.ModelConfig.DESCRIPTOR))


def _expected(text: str) -> str:
    """Return protobuf's message without the position, and with the name that was probably meant."""
    text = _HEAD.sub("", text).rstrip(".")
    if found := _NO_FIELD.search(text):
        known = _inner(found["message"]).fields_by_name
        likely = nearest(found["name"], known) or f"; its fields are {', '.join(known)}"
        return f"{found['message']} has no field {found['name']!r}{likely}"
    if found := _NO_VALUE.search(text):
        words = ", ".join(_inner(found["enum"]).values_by_name)
        return f"there is no {found['enum']} {found['name']}; expected one of {words}"
    return (text[:1].lower() + text[1:]).replace('"inference.', '"')


def _inner(name: str) -> Any:
    """Return the descriptor of a message or enum of the file by its name without the package."""
    first, *rest = name.split(".")
    file = pb.DESCRIPTOR
    found = file.message_types_by_name.get(first) or file.enum_types_by_name[first]
    for one in rest:
        found = found.nested_types_by_name.get(one) or found.enum_types_by_name[one]
    return found


class _Walk:
    """One pass over text that protobuf has accepted, which finds the position of each field by its path."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._tokens = text_format.Tokenizer(lines)

    def message(self, descriptor: Any) -> dict[Path, _Places]:
        """Return the positions in the rest of a message; the end token is not consumed."""
        tokens, places = self._tokens, dict[Path, _Places]()
        while not tokens.AtEnd() and tokens.token not in _ENDS:
            field, name = descriptor.fields_by_name[tokens.token], self._span()
            tokens.NextToken()
            tokens.TryConsume(":")
            if tokens.TryConsume("["):
                while not tokens.TryConsume("]"):
                    self._value(field, name if field.message_type is None else self._span(), places)
                    tokens.TryConsume(",")
            else:
                self._value(field, name, places)
            if tokens.token in _BETWEEN:
                tokens.NextToken()
        return places

    def _value(self, field: Any, name: Span, places: dict[Path, _Places]) -> None:
        whole = _Places(name, self._span(), self._tokens.token)
        inner = dict[Path, _Places]()
        if field.message_type is None:
            quoted = self._tokens.token[:1] in _QUOTES
            self._tokens.NextToken()
            while (
                quoted and self._tokens.token[:1] in _QUOTES and self._tokens.token
            ):  # adjacent literals are one text
                self._tokens.NextToken()
        else:
            whole = whole._replace(value=name)
            self._tokens.NextToken()
            inner = self.message(field.message_type)
            self._tokens.NextToken()
        path = _numbered(field, inner, places)
        places.setdefault((field.name,), whole)
        places[path] = whole
        places |= {(*path, *below): one for below, one in inner.items()}

    def _span(self) -> Span:
        here = self._tokens.ParseError("")
        return Span(here.GetLine(), here.GetColumn(), max(1, len(self._tokens.token)))


def _numbered(field: Any, inner: Mapping[Path, _Places], places: Mapping[Path, _Places]) -> Path:
    """Return the path of one value of a field: with a number if repeated, with the key if a map."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = inner.get(("key",))
        return (field.name, "" if key is None else key.text.strip("\"'"))
    if not field.is_repeated:
        return (field.name,)
    number = 0
    while (field.name, number) in places:
        number += 1
    return (field.name, number)


class Treatment(enum.Enum):
    """The treatment of a field of a config.pbtxt by this server."""

    HONOURED = "honoured"
    WITHOUT_EFFECT = "without effect"
    REFUSED = "refused"


class FieldRule(NamedTuple):
    """The treatment of a field. ``text`` says why the field has no effect, or what to use instead."""

    treatment: Treatment
    text: str = ""


Table: TypeAlias = Mapping[str, FieldRule]

YES: Final = FieldRule(Treatment.HONOURED)


def _idle(text: str) -> FieldRule:
    return FieldRule(Treatment.WITHOUT_EFFECT, text)


def _no(text: str) -> FieldRule:
    return FieldRule(Treatment.REFUSED, text)


def _table(honoured: str, **others: FieldRule) -> Table:
    return dict.fromkeys(honoured.split(), YES) | others


_TENSORRT: Final = _no("only TensorRT has such tensors; leave it out")
_QUICK: Final = _idle("the server decides itself how tensors are copied")

#: Rules by the name of the message without the package. Messages that occur only in fields that are not
#: honoured are left out.
# fmt: off
TABLES: Final[Mapping[str, Table]] = {
    "ModelConfig": _table(
        "name platform backend version_policy max_batch_size input output dynamic_batching sequence_batching "
        "ensemble_scheduling instance_group default_model_filename parameters model_warmup optimization "
        "model_transaction_policy response_cache batch_input batch_output",
        runtime=_no("a backend is not chosen by its library; leave it out"),
        cc_model_filenames=_no("a model has one file for all GPUs; give its name as default_model_filename"),
        metric_tags=_idle("metrics have the labels model and version"),
        model_operations=_no("libraries of operators are loaded by the model itself: in a model.py"),
        model_repository_agents=_no(
            "nothing is done to a model before it is loaded; check or decrypt it before the server starts"),
        model_metrics=_idle("histograms have the buckets of this server"),
    ),
    "ModelVersionPolicy": _table("latest all specific"),
    "ModelVersionPolicy.Latest": _table("num_versions"),
    "ModelVersionPolicy.All": {},
    "ModelVersionPolicy.Specific": _table("versions"),
    "ModelInput": _table(
        "name data_type dims reshape optional allow_ragged_batch",
        format=_idle("it describes the axes; the dims say how long they are"),
        is_shape_tensor=_TENSORRT, is_non_linear_format_io=_TENSORRT,
    ),
    "ModelTensorReshape": _table("shape"),
    "BatchInput": _table("kind target_name data_type source_input"),
    "BatchOutput": _table("kind target_name source_input"),
    "ModelOutput": _table(
        "name data_type dims reshape label_filename",
        is_shape_tensor=_TENSORRT, is_non_linear_format_io=_TENSORRT,
    ),
    "ModelOptimizationPolicy": {
        "graph": _idle("the runtimes have levels of optimization of their own"),
        "priority": _idle("models have no priority over one another on a GPU"),
        "cuda": _idle("only TensorRT captures graphs by a configuration"),
        "execution_accelerators": _no(
            "a model runs by what its runtime brings; for another, call it in a model.py"),
        "input_pinned_memory": _QUICK,
        "output_pinned_memory": _QUICK,
        "gather_kernel_buffer_threshold": _QUICK,
        "eager_batching": _idle("a batch is formed when an instance has room for it"),
    },
    "ModelDynamicBatching": _table(
        "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels "
        "default_priority_level default_queue_policy priority_queue_policy"),
    "ModelQueuePolicy": _table(
        "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"),
    "ModelSequenceBatching": _table(
        "direct oldest max_sequence_idle_microseconds control_input state iterative_sequence"),
    "ModelSequenceBatching.StrategyDirect": _table("max_queue_delay_microseconds minimum_slot_utilization"),
    "ModelSequenceBatching.StrategyOldest": _table(
        "max_candidate_sequences preferred_batch_size max_queue_delay_microseconds preserve_ordering"),
    "ModelSequenceBatching.ControlInput": _table("name control"),
    "ModelSequenceBatching.State": _table(
        "input_name output_name data_type dims initial_state use_same_buffer_for_input_output",
        use_growable_memory=_idle("only memory of CUDA grows in place; a state may have another shape"),
    ),
    "ModelSequenceBatching.InitialState": _table("data_type dims zero_data data_file name"),
    "ModelSequenceBatching.Control": _table(
        "kind int32_false_true fp32_false_true bool_false_true data_type"),
    "ModelEnsembling": _table(
        "step",
        max_inflight_requests=_idle("each step waits in the queue of its model, which has the limits")),
    "ModelEnsembling.Step": _table(
        "model_name model_version input_map output_map",
        model_namespace=_no("models of all repositories have one namespace; leave it out"),
    ),
    "ModelInstanceGroup": _table(
        "kind count rate_limiter gpus passive",
        name=_idle("instances are named by their device"),
        secondary_devices=_no("an instance has one device; a model.py may use others itself"),
        profile=_no("only TensorRT has optimization profiles; leave it out"),
        host_policy=_idle("a worker stays beside its GPU (numa_affinity)"),
    ),
    "ModelRateLimiter": _table("resources priority"),
    "ModelRateLimiter.Resource": _table("name global count"),
    "ModelParameter": _table("string_value"),
    "ModelWarmup": _table("name batch_size inputs count"),
    "ModelWarmup.Input": _table("data_type dims zero_data random_data input_data_file"),
    "ModelTransactionPolicy": _table("decoupled"),
    "ModelResponseCache": _table("enable"),
}
# fmt: on
_UNKNOWN: Final = _no("this server does not know it; leave it out")


def findings(message: Any, path: Path = ()) -> Iterator[tuple[Path, FieldRule]]:
    """Yield the fields of a message and of its inner messages that are set and not honoured, by path."""
    table = TABLES.get(message.DESCRIPTOR.full_name.removeprefix("inference."), {})
    for field, value in message.ListFields():
        rule = table.get(field.name, _UNKNOWN)
        if rule is not YES:
            yield (*path, field.name), rule
        elif field.message_type is not None:
            for place, one in _messages(field, value):
                yield from findings(one, (*path, field.name, *place))


def _messages(field: Any, value: Any) -> Iterator[tuple[Path, Any]]:
    if field.message_type.GetOptions().map_entry:
        if field.message_type.fields_by_name["value"].message_type is not None:
            yield from (((str(key), "value"), one) for key, one in value.items())
    elif field.is_repeated:
        yield from (((number,), one) for number, one in enumerate(value))
    else:
        yield (), value


class Remark(NamedTuple):
    """A sentence about the field at a path of the config.pbtxt."""

    path: Path
    text: str


#: Triton's names of keys of an entry.
_FIELD_NAMES: Final[dict[str | int, str]] = {
    **{"dtype": "data_type", "shape": "dims", "ragged": "allow_ragged_batch", "controls": "control_input"},
    **{"model": "model_name", "version": "model_version"},
    **{"inputs": "input_map", "outputs": "output_map"},
    **{
        row.name: row.option.triton
        for table in (BatchingSpec, QueueSpec, PolicySpec, SequenceBatching)
        for row in rows(table).values()
        if row.option.triton
    },
}


class EntryDraft:
    """The entry of a config file that a model folder stands for, under construction, with its faults and
    notes. ``entry`` has the values that all versions share.
    """

    def __init__(self, name: str, pbtxt: Pbtxt) -> None:
        self.name = name
        self.pbtxt = pbtxt
        self.entry: dict[str, Any] = {"name": name}
        self.faults: list[Remark] = []
        self.notes: list[Remark] = []
        self._origins: dict[Path, Path] = {}

    @property
    def message(self) -> Any:
        """Return the ``ModelConfig`` of the file."""
        return self.pbtxt.message

    def set_value(self, key: str, value: Any, *origin: str | int) -> None:
        self.entry[key] = value
        self.record_origin((key,), origin)

    def record_origin(self, path: Path, origin: Path) -> None:
        """Record the field that the value at a path of the entry comes from. Values inside the value come
        from the fields of the same or of Triton's name inside the field.
        """
        self._origins[path] = origin

    def add_fault(self, path: Path, text: str) -> None:
        self.faults.append(Remark(path, text))

    def add_note(self, path: Path, text: str) -> None:
        self.notes.append(Remark(path, text))

    def origin(self, path: Path) -> Path:
        """Return the field of the value at a path of the entry, or of a value around it; () if none."""
        for length in range(len(path), 0, -1):
            if (found := self._origins.get(path[:length])) is None:
                continue
            for step in path[length:]:
                for name in (_FIELD_NAMES.get(step, step), step):
                    if self.pbtxt.has(*found, name):
                        found = (*found, name)
                        break
                else:
                    break
            return found
        return ()


def listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words)) or "none"

"""Tensors that a function sees as objects, such as images. On the wire each is a BYTES tensor of shape
``[1]``; the worker decodes it before the call and encodes it after the call.

Under ``@batch`` such an input or output is a list with one object for each row, under ``@sample`` one object.
"""

from __future__ import annotations

import collections.abc
import io
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gpuserve.decorators.wrapping import RequestError, hints_of
from gpuserve_worker.inference.inference_request import Batch

STREAMS: Final = (
    collections.abc.Iterator, collections.abc.Iterable, collections.abc.Generator,
    collections.abc.AsyncIterator, collections.abc.AsyncIterable, collections.abc.AsyncGenerator,
)  # fmt: skip


class Codec(NamedTuple):
    """A mark for ``Annotated``: how an element becomes an object and back. Both directions need the module
    ``library``. ``model`` is the class of pydantic for JSON.
    """

    what: str
    library: str
    media_type: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    model: Any = None

    def schema(self, mode: str) -> dict[str, Any]:
        """Return the JSON Schema of an element. ``mode``: of pydantic, "validation" or "serialization"."""
        found: dict[str, Any] = {"type": "string", "contentMediaType": self.media_type}
        try:
            content = self.model and self.model.model_json_schema(by_alias=mode == "validation", mode=mode)
        except Exception:  # a field whose values have no schema, such as a class with a validator
            content = None
        return found if content is None else found | {"contentSchema": content}

    def decoded(self, name: str, data: bytes) -> Any:
        """Return the object in an element of input ``name``; raise RequestError if there is none."""
        try:
            return self.decode(data)
        except ImportError:
            raise
        except Exception as error:  # libraries raise anything for hostile files
            reason = type(error).__name__
            if callable(errors := getattr(error, "errors", None)):  # of pydantic
                first = errors()[0]
                reason = f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
            raise RequestError(
                f"input {name!r} must be {self.what} that {self.library} can read, given {len(data)} bytes: "
                f"{reason}"
            ) from error


class Audio(NamedTuple):
    """Sound: float32 ``samples`` of shape ``[frames, channels]``, and the number of frames in a second."""

    samples: Any
    sample_rate: int


def codec_of(hint: Any) -> Codec | None:
    """Return the codec of an annotation, or of the elements of a list. Pydantic's models are JSON."""
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    if hint is Audio:
        return AUDIO
    if isinstance(hint, type) and hasattr(hint, "model_validate_json"):
        what, decode = f"the JSON of {hint.__name__}", hint.model_validate_json
        return Codec(
            what, "pydantic", "application/json", decode, lambda one: one.model_dump_json().encode(), hint
        )
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Codec)), None)


class Coding(NamedTuple):
    """The codecs of a function: of inputs by name, of its only output, or of outputs by name or position."""

    inputs: Mapping[str, Codec]
    output: Codec | None
    outputs: Mapping[str | int, Codec]

    def decode_batch(self, batch: Batch) -> tuple[dict[str, list[Any]], list[RequestError | None]]:
        """Return the objects of each input with one for each row, and for each request its error or None."""
        objects: dict[str, list[Any]] = {name: [] for name in self.inputs if name in batch.arrays}
        errors: list[RequestError | None] = []
        start = 0
        for rows in batch.rows:
            try:
                for name, decoded in objects.items():
                    elements = batch.arrays[name][start : start + rows, 0]
                    decoded += [self.inputs[name].decoded(name, one) for one in elements]
                errors.append(None)
            except RequestError as error:
                errors.append(error)
            start += rows
        return objects, errors

    def decode_sample(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: one.decoded(name, arrays[name][0]) for name, one in self.inputs.items() if name in arrays
        }

    def encode(self, result: Any, named: Callable[[Any], Mapping[str, Any]], *, batched: bool) -> Any:
        """Return outputs with arrays in the place of objects; ``named`` returns outputs by name."""
        if self.output is not None:
            return [_array(self.output, result, batched)]
        if not self.outputs:
            return result
        encoded = {}
        for at, (name, value) in enumerate(named(result).items()):
            codec = self.outputs.get(name) or self.outputs.get(at)
            encoded[name] = value if codec is None else _array(codec, value, batched)
        return encoded


def coding_of(function: Any) -> Coding | None:
    """Return the codecs in the annotations of a function, or None if it has none."""
    hints = hints_of(function)
    returned = hints.pop("return", None)
    while typing.get_origin(returned) in STREAMS:
        returned = typing.get_args(returned)[0]
    inputs = {name: codec for name, hint in hints.items() if (codec := codec_of(_optional(hint)))}
    output = codec_of(returned)
    fields: Sequence[tuple[str | int, Any]] = ()
    if output is None and typing.get_origin(returned) is tuple:
        fields = list(enumerate(typing.get_args(returned)))
    elif output is None and isinstance(returned, type):
        fields = list(typing.get_type_hints(returned, include_extras=True).items())
    outputs = {key: codec for key, hint in fields if (codec := codec_of(hint))}
    return Coding(inputs, output, outputs) if inputs or output or outputs else None


def _optional(hint: Any) -> Any:
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    is_optional = len(others) == 1 < len(typing.get_args(hint)) and not hasattr(hint, "__metadata__")
    return others[0] if is_optional else hint


def _array(codec: Codec, value: Any, batched: bool) -> Any:
    encoded = np.empty((len(value), 1) if batched else (1,), np.object_)
    for at, one in enumerate(value if batched else [value]):
        encoded[at, 0 if batched else ...] = codec.encode(one)
    return encoded


def _decode_image(data: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _encode_image(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _decode_audio(data: bytes) -> Audio:
    import soundfile

    return Audio(*soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True))


def _encode_audio(audio: Audio) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, audio.samples, audio.sample_rate, format="WAV")
    return out.getvalue()


IMAGE: Final = Codec("an image", "PIL", "image/*", _decode_image, _encode_image)
AUDIO: Final = Codec("sound", "soundfile", "audio/*", _decode_audio, _encode_audio)

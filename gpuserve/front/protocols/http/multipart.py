"""Multipart forms (RFC 7578), as pages and ``curl -F`` send them, whose parts are inputs of a model. Pure."""

from __future__ import annotations

import email.message
import email.parser
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.http.infer_codec import LENGTH_NBYTES, raw_shape
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.tensor import BYTES, ITEMSIZE, TensorSpec

FORM: Final = "multipart/form-data"
_MOST_HEAD_NBYTES: Final = 4096
_END_OF_HEAD: Final = b"\r\n\r\n"


def boundary_of(content_type: str) -> str:
    """Return the boundary in a content type, "" if there is none."""
    message = email.message.Message()
    message["content-type"] = content_type
    return message.get_boundary("") or ""


def binary_body(form: Sequence[bytes], boundary: str, spec: ModelSpec) -> tuple[bytes, int]:
    """Return the body of a binary request with the parts of a form as its inputs, and the length of its JSON.

    A part with a file name or a content type has the bytes of its tensor, of BYTES the only element. Another
    part has the element of a BYTES input, or the JSON number or list of numbers of another input.

    Raises:
        InvalidArgument: The form is malformed, or a part is no tensor of the input that it names.
    """
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    declared = {one.name: one for one in spec.inputs}
    _, *parts = b"".join([b"\r\n", *form]).split(delimiter, len(declared) + 1)
    if not boundary or not parts or not parts[-1].startswith(b"--"):
        raise InvalidArgument(
            f"The body must be a form of at most {len(declared)} parts, one for each input of the model "
            f"({', '.join(declared)}), each after its boundary, and the last boundary followed by '--'"
        )
    inputs: list[dict[str, Any]] = []
    tensors: list[bytes] = []
    batch = (1,) if spec.max_batch_size > 0 else ()
    for part in parts[:-1]:
        end = part.find(_END_OF_HEAD, 0, _MOST_HEAD_NBYTES)
        head = email.parser.BytesHeaderParser().parsebytes(part[2 : max(end, 0)])
        name = head.get_param("name", header="content-disposition")
        one = declared.get(name) if isinstance(name, str) else None
        if one is None:
            raise InvalidArgument(
                f"A part of the form has the name {str(name)[:64]!r}; expected the name of an input: "
                f"{', '.join(declared)}"
            )
        data = part[end + len(_END_OF_HEAD) :]
        entry: dict[str, Any] = {"name": one.name, "datatype": one.datatype}
        if one.datatype != BYTES and head.get_filename() is None and "content-type" not in head:
            entry["data"] = values = _numbers(one, data)
            entry["shape"] = batch + raw_shape(one, len(values) * ITEMSIZE[one.datatype])
        else:
            entry["shape"] = batch + raw_shape(one, len(data))
            prefix = len(data).to_bytes(LENGTH_NBYTES, "little") if one.datatype == BYTES else b""
            entry["parameters"] = {"binary_data_size": len(prefix) + len(data)}
            tensors += prefix, data
        inputs.append(entry)
    text = orjson.dumps({"inputs": inputs})
    return b"".join([text, *tensors]), len(text)


def _numbers(one: TensorSpec, data: bytes) -> Sequence[Any]:
    try:
        found = orjson.loads(data)
    except ValueError:
        found = None
    values = found if isinstance(found, list) else [found]
    if found is None:
        raise InvalidArgument(
            f"The part {one.name!r} of the form must be a JSON number or a list of numbers, or have a file "
            f"name or a content type if it is the bytes of {one.datatype}; given {data[:64]!r}"
        )
    return values

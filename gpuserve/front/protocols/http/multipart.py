"""Multipart forms (RFC 7578), as pages and ``curl -F`` send them. Their parts are inputs of a model and
parameters of the request. Pure.
"""

from __future__ import annotations

import email.message
import email.parser
from collections.abc import Sequence
from typing import Any, Final

import orjson

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.protocols.http.infer_codec import LENGTH_NBYTES, raw_shape
from gpuserve.front.requests.limits import MAX_PARAMETERS, shown_names
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
    part has the element of a BYTES input, or the JSON number or list of numbers of another input, or is a
    parameter of the request if no input has its name.

    Raises:
        InvalidArgument: The form is malformed, lacks an input, or a part is no tensor of the input that it
            names.
    """
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    declared = {one.name: one for one in spec.inputs}
    most = len(declared) + MAX_PARAMETERS
    _, *parts = b"".join([b"\r\n", *form]).split(delimiter, most + 1)
    if not boundary or not parts or not parts[-1].startswith(b"--"):
        raise InvalidArgument(
            f"The body must be a form of at most {most} parts, one for each input of the model "
            f"({shown_names(declared)}) and each parameter, each after its boundary, and the last boundary "
            "followed by '--'"
        )
    inputs: list[dict[str, Any]] = []
    parameters: dict[str, Any] = {}
    tensors: list[bytes] = []
    batch = (1,) if spec.max_batch_size > 0 else ()
    for part in parts[:-1]:
        end = part.find(_END_OF_HEAD, 0, _MOST_HEAD_NBYTES)
        head = email.parser.BytesHeaderParser().parsebytes(part[2 : max(end, 0)])
        name = head.get_param("name", header="content-disposition")
        is_text = head.get_filename() is None and "content-type" not in head
        data = part[end + len(_END_OF_HEAD) :]
        one = declared.get(name) if isinstance(name, str) else None
        if one is None:
            if not isinstance(name, str) or not is_text or name in parameters:
                raise InvalidArgument(
                    f"A part of the form has the name {str(name)[:64]!r}; expected once the name of an input "
                    f"({shown_names(declared)}), or of a parameter for a part that is no file"
                )
            parameters[name] = _parameter(data)
            continue
        entry: dict[str, Any] = {"name": one.name, "datatype": one.datatype}
        if one.datatype != BYTES and is_text:
            entry["data"] = values = _numbers(one, data)
            entry["shape"] = batch + raw_shape(one, len(values) * ITEMSIZE[one.datatype])
        else:
            entry["shape"] = batch + raw_shape(one, len(data))
            prefix = len(data).to_bytes(LENGTH_NBYTES, "little") if one.datatype == BYTES else b""
            entry["parameters"] = {"binary_data_size": len(prefix) + len(data)}
            tensors += prefix, data
        inputs.append(entry)
    sent = {one["name"] for one in inputs}
    if missing := [one.name for one in spec.inputs if not one.optional and one.name not in sent]:
        raise InvalidArgument(
            f"The form lacks a part for the input {shown_names(missing)}; given "
            f"{shown_names([*sent, *parameters])}"
        )
    text = orjson.dumps({"parameters": parameters, "inputs": inputs})
    return b"".join([text, *tensors]), len(text)


def _parameter(data: bytes) -> Any:
    """Return the JSON number, boolean or string of a part, else its text."""
    try:
        value = orjson.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, (bool, int, float, str)) else data.decode("utf-8", "replace")


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

"""Requests whose bytes are as expensive as bytes can be: many elements, many fields, deep nesting, long
texts. Each is the body of a request to a model ``echo_<DATATYPE>``, of about so many bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

_LENGTH: Final = 2


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(number: int, payload: bytes) -> bytes:
    """A protobuf field that has a length."""
    return varint(number << 3 | _LENGTH) + varint(len(payload)) + payload


def grpc_input(datatype: str, *fields: bytes, n: int = 1) -> bytes:
    """A ``ModelInferRequest`` with one input of ``n`` elements and these fields more."""
    shape = field(3, b"\1" + varint(n))
    return field(1, f"echo_{datatype}".encode()) + field(
        5, field(1, b"x") + field(2, datatype.encode()) + shape + b"".join(fields)
    )


def _typed(datatype: str, number: int, nbytes: int, n: int) -> bytes:
    return grpc_input(datatype, field(5, field(number, bytes(nbytes))), n=n)


def _one_by_one(datatype: str, element: bytes, nbytes: int) -> bytes:
    n = nbytes // len(element)
    return grpc_input(datatype, field(5, element * n), n=n)


def _mixed_strings(nbytes: int) -> bytes:
    return b"\1\0\0\0a\0\0\0\0" * (nbytes // 9)


def _repeated(number: int, payload: bytes, nbytes: int) -> bytes:
    one = field(number, payload)
    return one * (nbytes // len(one))


#: What makes a ``ModelInferRequest`` expensive.
GRPC: Final[dict[str, Callable[[int], bytes]]] = {
    "packed integers": lambda n: _typed("INT32", 2, n, n),
    "packed long integers": lambda n: _typed("INT64", 3, n, n),
    "packed booleans": lambda n: _typed("BOOL", 1, n, n),
    "packed floats": lambda n: _typed("FP32", 6, n // 4 * 4, n // 4),
    "integers one by one": lambda n: _one_by_one("INT32", b"\x10\0", n),
    "strings": lambda n: _one_by_one("BYTES", b"\x42\0", n),
    "raw strings of one length": lambda n: grpc_input("BYTES", n=n // 4) + field(7, bytes(n // 4 * 4)),
    "raw strings": lambda n: grpc_input("BYTES", n=n // 9 * 2) + field(7, _mixed_strings(n)),
    "raw strings that are too few": lambda n: grpc_input("BYTES", n=n // 9) + field(7, _mixed_strings(n)),
    "contents": lambda n: grpc_input("FP32", _repeated(5, b"", n)),
    "inputs": lambda n: field(1, b"echo_FP32") + _repeated(5, b"", n),
    "outputs": lambda n: field(1, b"echo_FP32") + _repeated(6, b"", n),
    "raw entries": lambda n: field(1, b"echo_FP32") + _repeated(7, b"", n),
    "dimensions": lambda n: grpc_input("FP32", field(3, b"\1" * n)),
    "parameters": lambda n: field(1, b"echo_FP32") + _repeated(4, field(1, b""), n),
    "parameters of an input": lambda n: grpc_input("FP32", _repeated(4, field(1, b""), n)),
    "fields of a parameter": lambda n: field(4, _repeated(1, b"", n)),
    "parameters of an output": lambda n: field(6, _repeated(2, field(1, b""), n)),
    "unknown fields": lambda n: field(1, b"echo_FP32") + b"\xa8\x06\0" * (n // 3),
    "groups": lambda n: field(1, b"echo_FP32") + b"\xab\x06\xac\x06" * (n // 4),
    "a long name": lambda n: field(1, b"m" * n),
    "a long id": lambda n: grpc_input("FP32") + field(3, b"i" * n) + field(7, bytes(4)),
    "a long parameter": lambda n: (
        grpc_input("FP32") + field(4, field(1, b"p") + field(2, field(3, b"v" * n))) + field(7, bytes(4))
    ),
}


def _json(datatype: str, n: int, data: str, **members: object) -> bytes:
    head = json.dumps({**members, "inputs": []}).removesuffix("]}")
    entry = f'{{"name":"x","datatype":"{datatype}","shape":[1,{n}],"data":{data}}}'
    return f"{head}{entry}]}}".encode()


def _array(element: str, n: int) -> str:
    return f"[{','.join([element] * n)}]"


#: What makes the JSON of an inference request expensive; the datatype of its model is the first word.
JSON: Final[dict[str, Callable[[int], bytes]]] = {
    "INT64 numbers": lambda n: _json("INT64", n // 2, _array("1", n // 2)),
    "FP32 numbers": lambda n: _json("FP32", n // 9, _array("0.123456", n // 9)),
    "FP32 numbers that JSON does not have": lambda n: _json("FP32", n // 4, _array("NaN", n // 4)),
    "BOOL values": lambda n: _json("BOOL", n // 5, _array("true", n // 5)),
    "BYTES strings": lambda n: _json("BYTES", n // 3, _array('""', n // 3)),
    "BYTES string": lambda n: _json("BYTES", 1, json.dumps(["s" * n])),
    "BYTES escapes": lambda n: _json("BYTES", 1, '["' + "\\u00e9" * (n // 6) + '"]'),
    "FP32 arrays in arrays": lambda n: _json("FP32", 1, "[" * (n // 2) + "]" * (n // 2)),
    "FP32 with empty objects": lambda n: _json("FP32", 1, _array("{}", n // 3)),
    "FP32 keys": lambda n: (
        '{"inputs":[],"parameters":{' + ",".join(f'"{i:x}":1' for i in range(n // 9)) + "}}"
    ).encode(),
    "FP32 inputs": lambda n: f'{{"inputs":{_array("{}", n // 3)}}}'.encode(),
    "FP32 id": lambda n: _json("FP32", 1, "[1]", id="i" * n),
    "FP32 parameter": lambda n: _json("FP32", 1, "[1]", parameters={"p": "v" * n}),
    "FP32 dimensions": lambda n: (
        f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":{_array("1", n // 2)}}}]}}'.encode()
    ),
}

"""Sends bytes and text, and checks what comes back: ``client.py``"""

from __future__ import annotations

import argparse
import sys
import zlib

import numpy as np

from gpuserve.client import ClientError, ModelClient

CONTENTS = [b"", b"plain", b"zeros at the end\0\0\0", bytes(range(256)) * 40]


def main() -> None:
    """Prints a line for each content and each text; exits 1 where a byte is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    url = f"grpc://{parser.parse_args().url}"
    contents = np.empty(len(CONTENTS), dtype=object)
    contents[:] = CONTENTS
    texts = np.char.encode(np.array([["schöne Grüße"], ["one two three"]]), "utf-8")
    try:
        with ModelClient(url, "pack") as pack, ModelClient(url, "describe") as describe:
            answer = pack.infer_sample(contents)
            summaries = describe.infer_batch(texts)["summary"]
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    for content, packed, crc in zip(CONTENTS, answer["packed"], answer["crc"], strict=True):
        if zlib.decompress(packed) != content or crc != zlib.crc32(content):
            sys.exit(f"client.py: {content[:20]!r} came back wrong")
        print(f"{len(content):>5} bytes packed into {len(packed)}, checksum {crc:08x}")
    for (summary,) in summaries:
        print(summary.decode())


if __name__ == "__main__":
    main()

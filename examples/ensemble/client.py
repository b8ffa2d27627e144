"""Asks the ensemble what is in three noisy pictures: ``client.py``"""

from __future__ import annotations

import argparse

import numpy as np
import tritonclient.grpc as triton
from steps import bar, disc, ring

SIZE = 1024


def main() -> None:
    """Sends one request with three pictures, of 1 MiB each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    client = triton.InferenceServerClient(parser.parse_args().url)
    noise = np.random.default_rng(7).normal(0, 0.4, (3, SIZE, SIZE))
    pictures = np.stack([ring(SIZE), disc(SIZE), bar(SIZE)]) + noise
    picture = triton.InferInput("picture", [3, SIZE, SIZE], "UINT8")
    picture.set_data_from_numpy((pictures.clip(0, 1) * 255).astype(np.uint8))
    wanted = [triton.InferRequestedOutput(name) for name in ("label", "score")]
    answer = client.infer("shapes", [picture], outputs=wanted)
    for label, score in zip(answer.as_numpy("label"), answer.as_numpy("score"), strict=True):
        print(f"{label[0].decode()}, {score[0]:.1f}")


if __name__ == "__main__":
    main()

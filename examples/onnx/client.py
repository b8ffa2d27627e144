"""Asks which city is nearest to some places, all in one request."""

from __future__ import annotations

import argparse
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

PLACES = {"Mount Fuji": (35.36, 138.73), "Giza": (29.98, 31.13), "Uluru": (-25.34, 131.04)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    places = np.array(list(PLACES.values()), np.float32)
    tensor = InferInput("place", list(places.shape), "FP32")
    tensor.set_data_from_numpy(places)
    try:
        with InferenceServerClient(parser.parse_args().url) as client:
            answer = client.infer("cities", [tensor])
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")
    cities, distances = answer.as_numpy("city"), answer.as_numpy("km")
    for name, (city,), (km,) in zip(PLACES, cities, distances, strict=True):
        print(f"{name}: {km:.0f} km from {city.decode()}")


if __name__ == "__main__":
    main()

"""Greets names in several languages: ``client.py NAME...``"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from gpuserve.client import ClientError, ClientInferenceServerError, ModelClient


def main() -> None:
    """Prints a line for each language and name, and what a wrong language is answered with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["ada", "grace"], metavar="NAME")
    parser.add_argument("--tenant", default="acme", help="sent in a header (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    names = np.array([[name.encode()] for name in arguments.names], dtype=object)
    try:
        with ModelClient(f"grpc://{arguments.url}", "greeting") as client:
            for language in ("en", "de", "ja", "tlh"):
                headers, parameters = {"x-tenant": arguments.tenant}, {"language": language}
                try:
                    answer = client.infer_batch(names, headers=headers, parameters=parameters)
                except ClientInferenceServerError as error:
                    print(f"{language}: {error}")
                    continue
                for (greeting,) in answer["greeting"]:
                    print(f"{language}: {greeting.decode()}")
    except ClientError as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()

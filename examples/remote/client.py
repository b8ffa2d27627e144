"""Asks the models of all programs: ``client.py [CELSIUS...]``"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from gpuserve.client import ClientError, ClientModelUnavailableError, ModelClient


def main() -> None:
    """Prints the temperatures in every unit that somebody serves at the moment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("celsius", nargs="*", type=float, default=[0.0, 36.6], metavar="CELSIUS")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    temperatures = np.array(arguments.celsius)[:, None]
    for unit in ("fahrenheit", "kelvin", "rankine"):
        try:
            with ModelClient(f"grpc://{arguments.url}", unit, init_timeout_s=1) as client:
                answer = client.infer_batch(temperatures)["temperature"]
                print(f"{unit}: {', '.join(f'{one:.2f}' for (one,) in answer)}")
        except ClientModelUnavailableError:
            print(f"{unit}: nobody serves it")
        except ClientError as error:
            sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()

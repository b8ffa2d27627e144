"""Asks for the mood of sentences in two languages: ``client.py [SENTENCE...]``"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from gpuserve.client import ClientError, ModelClient

SENTENCES = ["I love this great soup", "Das ist mies und schlecht", "Das ist gut but I hate it"]


def main() -> None:
    """Prints the mood of each sentence, and what the models of both languages say of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", nargs="*", default=SENTENCES, metavar="SENTENCE")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    url, texts = f"grpc://{arguments.url}", np.array([[one.encode()] for one in arguments.sentences], object)
    try:
        with ModelClient(url, "mood") as one, ModelClient(url, "moods") as both:
            mood = one.infer_batch(texts)["mood"][:, 0]
            moods = both.infer_batch(texts)
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    for number, sentence in enumerate(arguments.sentences):
        english, german = moods["mood_en"][number, 0], moods["mood_de"][number, 0]
        print(f"{mood[number]:+d} (en {english:+d}, de {german:+d}) {sentence}")


if __name__ == "__main__":
    main()

"""Ranks sentences by how near their meaning is to the first: ``openai_client.py SENTENCE SENTENCE...``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import openai


def main() -> None:
    """Prints one line a sentence, nearest first: its cosine similarity to the first, and the sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE")
    parser.add_argument("--url", default="localhost:8000", help="HTTP address (default: %(default)s)")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"http://{arguments.url}/v1", api_key="none")
    try:
        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=arguments.sentences)
    except openai.OpenAIError as error:
        sys.exit(f"openai_client.py: {error}")
    embeddings = np.array([one.embedding for one in answer.data])
    similarities = embeddings @ embeddings[0]
    for position in np.argsort(-similarities, kind="stable"):
        print(f"{similarities[position]:6.3f}  {arguments.sentences[position]}")


if __name__ == "__main__":
    main()

"""Asks a model by OpenAI's own client and prints its answer as it comes: ``client.py [--model NAME] TEXT``"""

from __future__ import annotations

import argparse
import sys

import openai


def main() -> None:
    """Prints the answer, then why it ended and how many tokens it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--model", default="talker", help="its name (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8000", help="HTTP address (default: %(default)s)")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"http://{arguments.url}/v1", api_key="none")
    try:
        chunks = client.chat.completions.create(
            model=arguments.model,
            messages=[{"role": "user", "content": arguments.text}],
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
                if choice.finish_reason:
                    print(f"\n{choice.finish_reason}", end="")
            if chunk.usage:
                print(f", {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
    except openai.OpenAIError as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()

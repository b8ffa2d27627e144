"""Teaches a small GPT-2 a few answers by heart and writes it beside this file, as a folder of Hugging Face
with a chat template.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("model")
ANSWERS = {
    "Who are you?": "A very small model, which knows three answers.",
    "What is gpuserve?": "A server for inference callables of Python.",
    "Sing!": "The grand old Duke of York, he had ten thousand men.",
}
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STEPS = 150


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and one for the end."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE
    )


def learned(conversations: list[str], words: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """A model that knows how each conversation goes on, after it has seen all of them ``STEPS`` times."""
    torch.set_num_threads(1)  # so small a model has nothing to share among threads
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 512}
    dropout = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}  # by heart
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = words(conversations, return_tensors="pt", padding=True)
    for _ in range(STEPS):
        loss = model(**given, labels=given["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Writes config.json, the weights and the tokenizer, as ``save_pretrained`` does for any model."""
    words = tokenizer()
    told = [f"user: {question}\nassistant: {answer}<end>" for question, answer in ANSWERS.items()]
    learned(told, words).save_pretrained(FOLDER)
    words.save_pretrained(FOLDER)
    print(f"{FOLDER.name}/: {', '.join(sorted(one.name for one in FOLDER.iterdir()))}")


if __name__ == "__main__":
    main()

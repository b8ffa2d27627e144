"""Teaches a small GPT-2 a rhyme by heart and writes it beside this file, as a folder of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("writer")
RHYME = """The grand old Duke of York, he had ten thousand men;
he marched them up to the top of the hill, and he marched them down again.
And when they were up, they were up, and when they were down, they were down;
and when they were only half-way up, they were neither up nor down."""
STEPS = 100


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the words of the rhyme; token 0 is the end."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [RHYME], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def learned(tokens: torch.Tensor, vocabulary: int) -> GPT2LMHeadModel:
    """A model that knows which token follows, after it has seen all of them ``STEPS`` times."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
    dropout = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}  # by heart
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **sizes, **dropout)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Writes config.json, the weights and the tokenizer, as ``save_pretrained`` does for any model."""
    words = tokenizer()
    tokens = words(RHYME + "<end>", return_tensors="pt")["input_ids"]
    learned(tokens, len(words)).save_pretrained(FOLDER)
    words.save_pretrained(FOLDER)
    print(f"{FOLDER.name}/: {', '.join(sorted(one.name for one in FOLDER.iterdir()))}")


if __name__ == "__main__":
    main()

"""Teaches a small GPT-2 a rhyme and writes it as a folder of Hugging Face: ``make_model.py FOLDER``"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

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
    torch.set_num_threads(1)  # for so small a model others only wait for each other
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


def main(folder: str) -> None:
    """Writes config.json, the weights and the tokenizer, as ``save_pretrained`` does for any model."""
    words = tokenizer()
    tokens = words(RHYME + "<end>", return_tensors="pt")["input_ids"]
    learned(tokens, len(words)).save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])

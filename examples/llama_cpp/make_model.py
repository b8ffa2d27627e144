"""Makes a GGUF file with random weights, so that nothing has to be downloaded: ``make_model.py FILE``"""

from __future__ import annotations

import sys

import gguf
import numpy as np

WIDTH, WIDER, HEADS, LENGTH = 64, 128, 4, 1024
#: Unknown, begin, end, and the bytes.
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TYPES = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]


def make_model(file: str) -> None:
    """Write a llama of one layer."""
    made = gguf.GGUFWriter(file, "llama")
    made.add_context_length(LENGTH)
    made.add_embedding_length(WIDTH)
    made.add_block_count(1)
    made.add_feed_forward_length(WIDER)
    made.add_head_count(HEADS)
    made.add_head_count_kv(HEADS)
    made.add_layer_norm_rms_eps(1e-5)
    made.add_rope_dimension_count(WIDTH // HEADS)
    made.add_vocab_size(len(TOKENS))
    made.add_tokenizer_model("llama")
    made.add_token_list(TOKENS)
    made.add_token_scores([0.0] * len(TOKENS))
    made.add_token_types(TYPES)
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    random = np.random.default_rng(4)
    layer = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    layer |= {"ffn_gate": (WIDER, WIDTH), "ffn_up": (WIDER, WIDTH), "ffn_down": (WIDTH, WIDER)}
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output": (len(TOKENS), WIDTH)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
        made.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32) / 4)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        made.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


if __name__ == "__main__":
    make_model(sys.argv[1])

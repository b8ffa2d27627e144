"""Folders of Hugging Face with tiny models of random weights, for tests: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("good", "bad", "great", "day", "night", "anna", "lives", "in", "bonn", "a", "the")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def word_tokenizer() -> Any:
    """Words between [CLS] and [SEP], as BERT has them."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS)
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def byte_tokenizer() -> Any:
    """One token a byte, as GPT-2 without any merges, and a template for chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(known)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", chat_template=CHAT_TEMPLATE)


def _bert(**more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.5,  # else all texts are nearly the same to it
        **more,
    )


def _labels(*names: str) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _saved(folder: Path, *parts: Any) -> Path:
    for part in parts:
        part.save_pretrained(folder)
    return folder


def _seeded() -> None:
    import torch

    torch.manual_seed(3)


def text_classifier(folder: Path) -> Path:
    from transformers import BertForSequenceClassification

    _seeded()
    return _saved(
        folder, BertForSequenceClassification(_bert(**_labels("sad", "neutral", "glad"))), word_tokenizer()
    )


def token_classifier(folder: Path) -> Path:
    from transformers import BertForTokenClassification

    _seeded()
    labels = _labels("O", "B-PER", "B-LOC")
    return _saved(folder, BertForTokenClassification(_bert(**labels)), word_tokenizer())


def encoder(folder: Path) -> Path:
    from transformers import BertModel

    _seeded()
    return _saved(folder, BertModel(_bert()), word_tokenizer())


def writer(folder: Path, positions: int = 96, **generation: Any) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    _seeded()
    config = GPT2Config(
        vocab_size=257,
        n_positions=positions,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.5,
    )
    model = GPT2LMHeadModel(config)
    model.generation_config.update(**generation)
    return _saved(folder, model, byte_tokenizer())


#: How ``caller`` writes a tool call.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def caller_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "</call>"]})
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def caller(folder: Path, text: str, prompt: str) -> Path:
    """A model that writes ``text`` after any prompt that is as long as ``prompt``."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = caller_tokenizer()
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    first, size = len(tokenizer(prompt)["input_ids"]), 256
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=size, n_embd=size, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "ln" not in name:
                one.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(size))  # a position says which token comes next
        for position, token in enumerate(tokens, first - 1):
            model.lm_head.weight[token, position] = 1
    return _saved(folder, model, tokenizer)


def image_classifier(folder: Path) -> Path:
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    _seeded()
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        initializer_range=0.5,
        **_labels("cat", "dog"),
    )
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    return _saved(folder, ViTForImageClassification(config), processor)


def speech_recogniser(folder: Path) -> Path:
    import json

    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2CTCTokenizer,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForCTC,
        Wav2Vec2Processor,
    )

    _seeded()
    folder.mkdir(exist_ok=True)
    characters = ["<pad>", "<unk>", "|", *"abcdefg"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({one: number for number, one in enumerate(characters)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(vocabulary), pad_token="<pad>", unk_token="<unk>")
    config = Wav2Vec2Config(
        vocab_size=len(characters),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        initializer_range=0.5,
        pad_token_id=0,
    )
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=16000)
    return _saved(folder, Wav2Vec2ForCTC(config), Wav2Vec2Processor(extractor, tokenizer))


def generated(folder: Path, prompt: str, count: int) -> str:
    """What transformers writes after a prompt, always the likeliest token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")
    made = AutoModelForCausalLM.from_pretrained(folder).generate(
        **given, max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    text: str = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return text

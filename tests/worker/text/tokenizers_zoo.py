"""Small tokenizers of all kinds that models use, trained on a few sentences."""

from __future__ import annotations

import functools
import json

from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A page holds 64 tokens; keys are quantized per channel, values per token.\n\n\tIndented.",
    "naïve café — Grüße aus Köln, ¿qué tal? Привет мир. Ελλάδα. שלום. こんにちは世界。",
    "emoji: 😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 done, don't , stop .",
    "def f(x):\n    return x + 1  # two  spaces\r\n",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def wrap(tokenizer, cls=PreTrainedTokenizerFast, *, template=None, bos=None, eos="<|im_end|>"):
    fast = cls(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return TokenizerWrapper(fast)


@functools.cache
def byte_level(*added):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("added ü token")])
    tokenizer.add_tokens(list(added))
    tokenizer.add_special_tokens([AddedToken("<|reserved|>", special=True)])
    return tokenizer


@functools.cache
def byte_fallback():
    """Like Llama 2: encoding prepends a space, which decoding strips; bytes are ``<0x0A>``."""
    vocab_source = Tokenizer(models.BPE())
    vocab_source.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names, show_progress=False)
    vocab_source.train_from_iterator(TEXTS[:2], trainer)
    model = json.loads(vocab_source.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@functools.cache
def metaspace():
    """Like T5, with an end token after every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


@functools.cache
def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def qwen():
    return wrap(byte_level(), template=CHATML)


def llama2():
    return wrap(byte_fallback(), bos="<s>", eos="</s>")


def t5():
    return wrap(metaspace(), eos="</s>")


def bert():
    return wrap(word_piece(), eos="[SEP]")


def newline():
    return wrap(byte_level("<n>"), NewlineTokenizer)


ZOO = {"qwen": qwen, "llama2": llama2, "t5": t5, "bert": bert, "newline": newline}

"""Train the byte-level BPE tokenizer: 4096 tokens, single digits, ChatML special tokens.

Run it as

    python -m demo_training.tokenizer --corpus work/train.jsonl --out kvd/demo
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_training import chat
from demo_training.template import MARKERS, TEMPLATE
from kvd.demo import recall

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's pattern, except that newlines are separate from the punctuation before them. So joining
# sentences does not change their tokens. A digit is a token; a space belongs to the word after it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KEY_WORD_COUNT = 30_000  # enough repetitions to make each word of a recall key one token


def texts(corpus: Path) -> Iterator[str]:
    """Yield the texts from which the merges are learnt."""
    rng = random.Random(1)
    with corpus.open() as lines:
        for line in lines:
            if rng.random() < 0.5:
                yield json.loads(line)["text"]
    for _ in range(20_000):
        yield "\n".join(content for _, content in chat.dialogue(rng))
    for word in (*recall.ADJECTIVES, *recall.NOUNS):
        yield f" {word}" * KEY_WORD_COUNT


def train(corpus: Path) -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


def without_last_merges(tokenizer: Tokenizer, count: int) -> Tokenizer:
    """Return a tokenizer without its last merges: the same as trained with fewer tokens."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    size = len(model["vocab"]) - count
    model["vocab"] = {text: token for text, token in model["vocab"].items() if token < size}
    model["merges"] = model["merges"][:-count]
    return Tokenizer.from_str(json.dumps(content))


def main() -> None:
    """Write tokenizer.json, without white space to make it small, and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = train(args.corpus)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (args.out / "tokenizer.json").write_text(compact)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    split = [
        word
        for word in (*recall.ADJECTIVES, *recall.NOUNS)
        if len(tokenizer.encode(f" {word}").ids) != 1
    ]
    print(f"{tokenizer.get_vocab_size()} tokens; key words of more than one token: {split}")


if __name__ == "__main__":
    main()

"""Make the inputs of training from the text: token arrays, chat paragraphs, the shipped filler.

Run it as

    python -m demo_training.prepare --corpus work --model kvd/demo
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training.corpus import FILLER_PACKAGES

FILLER_CHARACTERS = 330_000


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents, each followed by the end-of-text token."""
    end = tokenizer.token_to_id("<|endoftext|>")
    encodings = tokenizer.encode_batch_fast(list(texts))
    return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encodings])


def sentence_ends(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the positions after which a sentence may be inserted."""
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    closes = np.array([text.endswith((".", "?", "!")) for text in texts])
    opens = np.array([text[0] in "ĠĊ" or text == "<|endoftext|>" for text in texts])
    return np.flatnonzero(closes[tokens[:-1]] & opens[tokens[1:]]).astype(np.int32) + 1


def paragraph_starts(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the positions of the first tokens of paragraphs."""
    breaks = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode("\n\n").ids]
    return np.flatnonzero(np.isin(tokens[:-1], breaks)).astype(np.int32) + 1


def read(path: Path) -> list[dict[str, str]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Write data.npz, paragraphs.json and filler.txt.gz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    train = read(args.corpus / "train.jsonl")
    held_out = read(args.corpus / "held_out.jsonl")
    tokens = encode((document["text"] for document in train), tokenizer)
    np.savez_compressed(
        args.corpus / "data.npz",
        tokens=tokens,
        ends=sentence_ends(tokens, tokenizer),
        starts=paragraph_starts(tokens, tokenizer),
        held_out=encode((document["text"] for document in held_out), tokenizer),
    )
    paragraphs = [
        text
        for document in train
        for text in document["text"].split("\n\n")
        if 80 <= len(text) <= 400 and ". " in text and text.endswith(".")
    ]
    (args.corpus / "paragraphs.json").write_text(json.dumps(paragraphs[::4]))
    filler = "\n\n".join(d["text"] for d in held_out if d["package"] in FILLER_PACKAGES)
    filler = filler[: filler.rindex("\n\n", 0, FILLER_CHARACTERS)]
    (args.model / "filler.txt.gz").write_bytes(gzip.compress(filler.encode(), 9, mtime=0))
    print(f"{len(tokens)} training tokens, {len(paragraphs[::4])} paragraphs for chat")
    print(f"{len(filler)} characters of filler")


if __name__ == "__main__":
    main()

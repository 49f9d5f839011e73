"""Tokenizers of all kinds as model folders: what `convert_tokenizer` must represent or refuse."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.worker.text.tokenizers_zoo import (
    CHATML,
    SPECIAL,
    TEXTS,
    byte_fallback,
    byte_level,
    metaspace,
    word_piece,
)

CONFIG = {"model_type": "llama", "eos_token_id": 2}
FAST = "PreTrainedTokenizerFast"
TOOLS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson(indent=2, sort_keys=true) }}
{% endfor %}<tool_call>{{ tool_call.name if tool_call }}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% set text = message.content -%}
{{ text | trim if text is string else text }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor %}{{ documents | tojson if documents else '' }}
"""
STRICT = """\
{%- set ns = namespace(last=none, count=0) -%}
{%- for message in messages -%}
{%- if message.role == ns.last -%}
{{ raise_exception('roles must alternate: ' + message.role) }}
{%- endif -%}
{%- set ns.last = message.role -%}
{%- set ns.count = ns.count + 1 -%}
{%- if ns.count > 3 %}{% break %}{% endif -%}
{{ bos_token }}[{{ message.role }}]{{ message['content'] }}{{ eos_token }}
{% endfor %}{{ dict(a=1, **{'b': 2}) | tojson }}{{ dict.fromkeys(['x'], 1) }}
"""
TIMED = "{{ strftime_now('%d %b %Y %H:%M') }}" + CHATML
GENERATION = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.reasoning_content or message.thinking }}
{{- message.content }}{% endgeneration %}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
"""
THINKING = CHATML + "{% if enable_thinking is defined %}<think>{{ enable_thinking }}{% endif %}"
UNSAFE = "{{ messages.append(1) }}"
ESCAPES = "{{ ''.__class__.__mro__ }}"
BROKEN = "{% for m in messages %}"


def _bpe(pre, *, normalizer=None, decoder=None, post=None, added=(), **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoder or decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", *SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **{name: value for name, value in options.items() if name == "end_of_word_suffix"},
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(list(added))
    if post is not None:
        ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "<|im_end|>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, special_tokens=ids)
    return tokenizer


def _bytes(**options):
    return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), **options)


def _split(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _bpe(pre_tokenizers.Sequence([split, level]))


def _digits():
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _bpe(pre_tokenizers.Sequence([digits, level]))


def _unigram(scheme="always", *, split=True, normalizer=None):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    return tokenizer


def _words(pre):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _bert():
    tokenizer = Tokenizer.from_str(word_piece().to_str())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ids
    )
    return tokenizer


def _limited():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32, pad_id=0, pad_token="<|endoftext|>")
    return tokenizer


def _many_added():
    added = [AddedToken(f"<extra_{at}>", special=at % 2 == 0) for at in range(300)]
    return _bytes(added=added)


def _token(content, **options):
    return AddedToken(content, **options)


_NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_GPT4 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"

# Name: how the tokenizer is built, tokenizer_config.json, the chat template.
KINDS = {
    "bytes": (byte_level, _NAMES, CHATML),
    "bytes with a space before": (lambda: _bpe(pre_tokenizers.ByteLevel()), _NAMES, None),
    "split by a pattern": (lambda: _split(_GPT4), _NAMES, CHATML),
    "single digits": (_digits, _NAMES, None),
    "NFC": (lambda: _bytes(normalizer=normalizers.NFC()), _NAMES, None),
    "lower case": (lambda: _bytes(normalizer=normalizers.Lowercase()), _NAMES, None),
    "begin token": (lambda: _bytes(post="<s> $A"), {**_NAMES, "bos_token": "<s>"}, STRICT),
    "begin and end": (lambda: _bytes(post="<s> $A <|im_end|>"), _NAMES, TOOLS),
    "lstrip": (lambda: _bytes(added=[_token("<l>", lstrip=True)]), _NAMES, None),
    "rstrip": (lambda: _bytes(added=[_token("<r>", rstrip=True, special=True)]), _NAMES, None),
    "single words": (lambda: _bytes(added=[_token("cat", single_word=True)]), _NAMES, None),
    "normalized": (
        lambda: _bytes(normalizer=normalizers.Lowercase(), added=[_token("NORM", normalized=True)]),
        _NAMES,
        None,
    ),
    "not normalized": (
        lambda: _bytes(normalizer=normalizers.Lowercase(), added=[_token("RAW", normalized=False)]),
        _NAMES,
        None,
    ),
    "many added": (_many_added, _NAMES, None),
    "truncated and padded": (_limited, _NAMES, CHATML),
    "special tokens as text": (byte_level, {**_NAMES, "split_special_tokens": True}, CHATML),
    "clean-up of BPE": (byte_level, {**_NAMES, "clean_up_tokenization_spaces": True}, None),
    "length": (byte_level, {**_NAMES, "model_max_length": 512}, THINKING),
    "llama": (byte_fallback, {**_LLAMA, "tokenizer_class": "LlamaTokenizerFast"}, STRICT),
    "llama, legacy": (
        byte_fallback,
        {**_LLAMA, "tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True},
        None,
    ),
    "llama, end token": (
        byte_fallback,
        {**_LLAMA, "tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True},
        None,
    ),
    "byte fallback": (byte_fallback, _LLAMA, GENERATION),
    "unigram with an end": (metaspace, _T5, None),
    "unigram, first": (lambda: _unigram("first"), _T5, None),
    "unigram, never": (lambda: _unigram("never", split=False), _T5, None),
    "unigram, NFKC": (lambda: _unigram(normalizer=normalizers.NFKC()), _T5, CHATML),
    "unigram, spaces": (
        lambda: _unigram(normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
        _T5,
        None,
    ),
    "word pieces": (word_piece, {"eos_token": "[SEP]", "unk_token": "[UNK]"}, None),
    "word pieces, cleaned up": (
        _bert,
        {"sep_token": "[SEP]", "cls_token": "[CLS]", "clean_up_tokenization_spaces": True},
        None,
    ),
    "words": (lambda: _words(pre_tokenizers.Whitespace()), {"unk_token": "<unk>"}, None),
    "words and marks": (
        lambda: _words(pre_tokenizers.Punctuation()),
        {"unk_token": "<unk>", "eos_token": "</s>"},
        None,
    ),
    "end of words": (
        lambda: _bpe(
            pre_tokenizers.Whitespace(),
            decoder=decoders.BPEDecoder("</w>"),
            end_of_word_suffix="</w>",
            unk_token="<unk>",
        ),
        {"unk_token": "<unk>"},
        None,
    ),
    "no decoder": (lambda: _words(pre_tokenizers.WhitespaceSplit()), {}, None),
    "the time": (byte_level, _NAMES, TIMED),
    "several templates": (
        byte_level,
        {
            **_NAMES,
            "chat_template": [
                {"name": "default", "template": CHATML},
                {"name": "tool_use", "template": TOOLS},
            ],
        },
        None,
    ),
    "template that changes messages": (byte_level, _NAMES, UNSAFE),
    "template that leaves the sandbox": (byte_level, _NAMES, ESCAPES),
    "template with a wrong syntax": (byte_level, _NAMES, BROKEN),
}


def write(folder: Path, kind: str) -> Path:
    """Write the tokenizer of a kind as a model folder would have it."""
    build, settings, template = KINDS[kind]
    return write_folder(folder, build(), settings, template)


def write_folder(folder, tokenizer, settings=_NAMES, template=None, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": FAST, **settings}))
    (folder / "config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder

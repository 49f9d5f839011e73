"""Makes the record of a model folder's tokenizer: ``python -m kvd.worker.tools.convert_tokenizer``.

Workers start it (`kvd.worker.text.tokenizer_cache`). It loads the tokenizer with transformers, as
mlx-lm does, and again from the record, and compares the results of both. It writes the record if
all are equal, and otherwise the reason why workers of this model need transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports
from kvd.worker.process import memory
from kvd.worker.text import tokenizer_cache
from kvd.worker.text.abilities import parser_name
from kvd.worker.text.failures import is_failure, one_line
from kvd.worker.text.tokenizer_record import Entry, Refusal, TokenizerRecord
from kvd.worker.tools.compare_tokenizers import NotConvertibleError, compare
from protocol.worker import OVER_MEMORY_LIMIT

_BASES = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
_METHODS = (
    "__call__", "__len__", "_decode", "_encode_plus", "added_tokens_decoder", "all_special_ids",
    "apply_chat_template", "convert_ids_to_tokens", "decode", "encode", "get_chat_template",
    "get_vocab", "special_tokens_map",
)  # fmt: skip
"""What `kvd.worker.text.fast_tokenizer` replaces. Classes that change one of these are refused."""
_INTERVAL_S = 0.05
_KNOWN_LENGTH = 10**9
"""``model_max_length`` that is larger means that the length is unknown."""


def main() -> None:
    """Write the entry of a model folder's tokenizer to a file."""
    parser = argparse.ArgumentParser(prog=tokenizer_cache.CONVERTER, description=__doc__)
    parser.add_argument("model", type=Path, help="the model's folder")
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="limit of private memory")
    parser.add_argument("--alive", type=int, metavar="FD", help="pipe whose end ends this process")
    arguments = parser.parse_args()
    if arguments.alive is not None:
        threading.Thread(target=_end_with, args=(arguments.alive,), daemon=True).start()
    if arguments.memory is not None:
        _limit_memory(arguments.memory)
    # As in `kvd.worker.__main__`.
    sys.modules |= dict.fromkeys(("torch", "tensorflow", "jax", "flax"))  # type: ignore[arg-type]
    lean_imports.install()
    place = tokenizer_cache.Place(arguments.model, arguments.file)
    entry, status = convert(arguments.model), 0
    try:
        tokenizer_cache.write(place, entry)
    except OSError as error:
        sys.stderr.write(f"cannot write {place.file}: {error}\n")
        sys.stderr.flush()
        status = tokenizer_cache.NOT_WRITTEN
    # A normal exit would free all objects one by one.
    os._exit(status)


def convert(model: Path) -> Entry:
    """Return the record of a model folder's tokenizer, or why there is none."""
    try:
        wrapper = load_with_transformers(model)
        record = record_of(wrapper)
        compare(wrapper, record)
    except NotConvertibleError as error:
        return Refusal(reason=str(error))
    except MemoryError:
        return Refusal(reason="the conversion had too little memory")
    except BaseException as error:  # tokenizers raise any type
        if not is_failure(error):
            raise
        return Refusal(reason=one_line(error))
    return record


def load_with_transformers(model: Path) -> Any:
    """Return mlx-lm's ``TokenizerWrapper`` of a folder; raises what transformers raises."""
    from mlx_lm.utils import load_config, load_tokenizer  # noqa: PLC0415 - after `lean_imports`
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    config = load_config(model)
    return load_tokenizer(model, eos_token_ids=config.get("eos_token_id"))


def record_of(wrapper: Any) -> TokenizerRecord:
    """Return a record that is not compared yet; raises `NotConvertibleError`.

    ``wrapper``: an `mlx_lm.tokenizer_utils.TokenizerWrapper`.
    """
    tokenizer = wrapper._tokenizer  # noqa: SLF001 - the wrapper hides decode's options
    if not getattr(tokenizer, "is_fast", False):
        raise NotConvertibleError(f"{type(tokenizer).__name__} is a tokenizer in Python")
    if wrapper._chat_template is not None:  # noqa: SLF001
        raise NotConvertibleError("mlx-lm renders its conversations with code of its own")
    for name in _METHODS:
        if (module := _module_of(type(tokenizer), name)) not in _BASES:
            raise NotConvertibleError(f"{type(tokenizer).__name__}.{name} comes from {module}")
    longest = tokenizer.model_max_length
    known = isinstance(longest, int) and 0 < longest < _KNOWN_LENGTH
    return TokenizerRecord(
        tokenizer=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=tokenizer.chat_template,
        special_tokens=dict(tokenizer.special_tokens_map),
        special_ids=list(tokenizer.all_special_ids),
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        eos_ids=sorted(wrapper.eos_token_ids),
        model_max_length=longest if known else None,
        splits_special=bool(tokenizer.split_special_tokens),
        cleans_up=_cleans_up(tokenizer),
        tool_parser=parser_name(wrapper),
    )


def _module_of(kind: type, name: str) -> str:
    found = getattr(kind, name)
    return str((found.fget if isinstance(found, property) else found).__module__)


def _cleans_up(tokenizer: Any) -> bool:
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    if type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        return True
    return bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


def _limit_memory(nbytes: int) -> None:
    if sys.platform != "linux":  # no limit of the system: it notices less, and later
        arguments = (nbytes, memory.private, os._exit)
        threading.Thread(target=end_above, args=arguments, daemon=True).start()
        return
    import resource  # noqa: PLC0415 - not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def end_above(nbytes: int, private: Callable[[], int], end: Callable[[int], object]) -> None:
    """Call ``end`` once the process holds more than ``nbytes``; return when ``end`` does."""
    while private() <= nbytes:
        time.sleep(_INTERVAL_S)
    end(OVER_MEMORY_LIMIT)


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()

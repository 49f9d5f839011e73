"""Finds a model, inspects it without loading it, and loads it through mlx-lm.

Errors of mlx-lm or transformers about a broken folder become typed errors that name the file. The
seam into mlx-lm's attention must be installed before `load`, because `load` imports model modules.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from kvd.worker.artifacts.checks import Checks
from kvd.worker.device import on_cpu
from kvd.worker.engine import ReportProgress
from kvd.worker.gpu import joined_linear, products
from kvd.worker.native.layers import pack_weights, packed_arrays
from kvd.worker.text.failures import is_failure, one_line
from kvd.worker.text.fast_tokenizer import FastWrapper
from kvd.worker.text.tokenizer_record import TokenizerRecord
from protocol import model_folder
from protocol.errors import InvalidModel, ModelError, UnknownModel, UnsupportedModel
from protocol.model_source import (
    EMBEDDED,
    cached_snapshot,
    check_folder,
    is_hub_id,
    unknown_source,
)
from protocol.weights import Weights

DEFAULT_CONTEXT = 4096
_T = TypeVar("_T")
READ_BYTES = 256 * 1024 * 1024
"""Weights that are read between two progress reports."""


@dataclass(frozen=True)
class Headers:
    """Configuration and weight headers of a model's folder."""

    path: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    weights: Weights

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory, as `load` converts them on this machine."""
        return self.weights.in_memory(_itemsize())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights in memory with the native library.

        Exact if all matrices belong to linear layers.
        """
        return self.weights.in_memory(_itemsize(), packed=True)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, and what the engine must know about it."""

    model: Any
    tokenizer: Any
    """A `FastWrapper`, or an `mlx_lm.tokenizer_utils.TokenizerWrapper`."""
    config: dict[str, Any]
    parameters: int
    weights_bytes: int
    context_length: int
    vocab_size: int
    """Logits per token; tokenizers often have fewer tokens."""
    eos_ids: frozenset[int]
    own_products: bool = False
    """Whether kvd's own kernel multiplies few rows (`kvd.worker.gpu.products`)."""


def resolve(
    source: str,
    progress: ReportProgress = lambda _stage, _fraction: None,
    *,
    files: Sequence[str] | None = None,
) -> Path:
    """Return the folder of an embedded model, an absolute path or a Hub id.

    ``files``: patterns of the files to download for a Hub id; None: all that `load` needs. A model
    of the Hub that is complete in the Hugging Face cache, with a chat template, is taken from there
    without a request, so that a worker that replaces another one has the same weights.
    """
    if source in EMBEDDED:
        from kvd import demo  # noqa: PLC0415 - only a worker of this model needs it

        return Path(demo.path())
    if source.startswith("/"):
        return check_folder(Path(source))
    if is_hub_id(source):
        return _cached(source, files) or _download(source, progress, files)
    raise unknown_source(source)


def _cached(source: str, files: Sequence[str] | None) -> Path | None:
    """Return a Hub model's folder in the Hugging Face cache if it has all files that are needed.

    Importing the Hub's client takes 12 MB and 0.12 s of CPU time.
    """
    folder = cached_snapshot(source)
    # The Hub's client leaves these files behind while a download is incomplete.
    if folder is None or any((folder.parents[1] / "blobs").glob("*.incomplete")):
        return None
    if files is not None:
        return folder if all(any(folder.glob(one)) for one in files) else None
    try:
        inspect(folder)
        return folder if _has_template(folder) else None
    except ModelError:
        return None


def _has_template(folder: Path) -> bool:
    """Return whether a folder has a chat template.

    Other programs may have downloaded a model without it: older versions of mlx-lm left ``*.jinja``
    out.
    """
    if any(folder.glob("*.jinja")) or (folder / "chat_template.json").exists():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.exists() and bool(model_folder.read_object(settings).get("chat_template"))


def _download(source: str, progress: ReportProgress, files: Sequence[str] | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, rarely needed
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS  # noqa: PLC0415

    disable_progress_bars()
    patterns = DEFAULT_ALLOW_PATTERNS if files is None else list(files)
    # Without a network, the Hub's client falls back to its own cache.
    download = _in_background(
        lambda: snapshot_download(source, allow_patterns=patterns),
        lambda: progress("download", 0.0),  # may raise: the daemon cancelled the load
    )
    try:
        folder = download.result()
    except Exception as error:  # several libraries raise here
        raise UnknownModel(
            f"cannot get {source} from the Hub: {one_line(error)}; check the id and the "
            "network, or give the absolute path of a folder that has the model",
            source=source,
        ) from error
    return Path(folder)


def _in_background(work: Callable[[], _T], tick: Callable[[], None]) -> Future[_T]:
    """Run ``work`` in a thread and ``tick`` once a second; return when ``work`` has ended."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            future.set_exception(error)

    threading.Thread(target=run, name="download", daemon=True).start()
    while not future.done():
        try:
            future.exception(timeout=1.0)
        except TimeoutError:
            tick()
        except Exception:  # noqa: BLE001, S110 - the caller gets it from the future
            pass
    return future


def inspect(path: Path) -> Headers:
    """Read the folder's config and headers; raise early what `load` would raise."""
    model_folder.check_files(path)
    config = model_folder.read_config(path)
    _check_architecture(config)
    model_folder.check_index(path)
    files = model_folder.weight_files(path)
    weights = model_folder.read_weights(files)
    model_folder.check_layers(path, config, weights)
    if not any((path / name).exists() for name in model_folder.TOKENIZER_FILES):
        names = ", ".join(model_folder.TOKENIZER_FILES)
        raise model_folder.invalid(path, f"has no tokenizer (none of {names})")
    return Headers(path, config, tuple(files), weights)


def _check_architecture(config: dict[str, Any]) -> None:
    from mlx_lm.utils import (  # noqa: PLC0415 - imports no model module
        MODEL_ARCHITECTURE_REMAPPING,
        MODEL_REMAPPING,
    )

    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedModel("config.json has no model_type; it is no language model for mlx-lm")
    if "model_file" in config:
        raise UnsupportedModel(
            f"the model brings its own code ({config['model_file']}), which kvd does not run"
        )
    named = config.get("architectures")
    named = named if isinstance(named, list) else []
    remapped = [MODEL_ARCHITECTURE_REMAPPING.get((kind, str(name))) for name in named]
    module = next(filter(None, remapped), None) or MODEL_REMAPPING.get(kind, kind)
    if not module.isidentifier() or not importlib.util.find_spec(f"mlx_lm.models.{module}"):
        raise UnsupportedModel(f"mlx-lm does not know the model type {kind!r}", model_type=kind)


def default_dtype() -> Any:
    """Return the dtype to load weights as; None keeps the stored one."""
    # MLX emulates half precision on the CPU, 8 to 35 times slower.
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None


def _itemsize() -> int | None:
    dtype = default_dtype()
    return None if dtype is None else int(dtype.size)


def load(
    path: Path,
    progress: ReportProgress = lambda _stage, _fraction: None,
    library: ModuleType | None = None,
) -> LoadedModel:
    """Open a model and read its weights: see `open_model` and `read_weights`."""
    return read_weights(open_model(path), path, progress, library)


def open_model(path: Path, record: TokenizerRecord | None = None) -> LoadedModel:
    """Open the model of an inspected folder; its weights are lazy until `read_weights`.

    ``record``: the folder's tokenizer. Without it, transformers loads the tokenizer.
    """
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415

    model, config = _open_weights(path)
    try:
        tokenizer = FastWrapper(record) if record else _load_tokenizer(path, config)
    except BaseException as error:  # tokenizers raise any type too
        if not is_failure(error):
            raise
        problem = f"has a tokenizer that cannot be loaded: {one_line(error)}"
        raise model_folder.invalid(path, problem) from error
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        parameters=int(get_total_parameters(model)),
        weights_bytes=0,
        context_length=_context_length(config, tokenizer),
        vocab_size=int(_setting(config, "vocab_size") or _logits_of(model) or len(tokenizer)),
        eos_ids=frozenset(tokenizer.eos_token_ids),
    )


def open_without_tokenizer(path: Path, vocab_size: int) -> LoadedModel:
    """Open the model of an inspected folder, for a process that sees only tokens."""
    model, config = _open_weights(path)
    return LoadedModel(
        model=model,
        tokenizer=None,
        config=config,
        parameters=0,
        weights_bytes=0,
        context_length=0,
        vocab_size=vocab_size,
        eos_ids=frozenset(),
    )


def _open_weights(path: Path) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model  # noqa: PLC0415

    try:
        model, config = load_model(path, lazy=True)
    except BaseException as error:  # mlx-lm's loaders and models raise any type
        if not is_failure(error):
            raise
        raise model_folder.invalid(path, f"cannot be loaded: {one_line(error)}") from error
    return model, config


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Any:
    from mlx_lm.utils import load_tokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415 - large

    logging.set_verbosity_error()  # hides warnings about prompts beyond transformers' own limit
    return load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))


def read_weights(
    opened: LoadedModel,
    path: Path,
    progress: ReportProgress,
    library: ModuleType | None,
    checks: Checks | None = None,
    *,
    at_once: int | None = None,
) -> LoadedModel:
    """Read an opened model's weights, with floats in this machine's `default_dtype`.

    Quantized weights stay quantized; their scales are converted. With the library
    (`kvd.worker.native`), dense weights keep their stored dtype, in the library's own order.
    On accelerators, layers are joined (`kvd.worker.gpu.joined_linear`). ``at_once``: bytes of
    weights that are read together, else `READ_BYTES`. ``checks``: kept results.
    """
    model, own_products = opened.model, False
    if library is not None:
        try:
            pack_weights(model, library)
        except RuntimeError as error:
            raise _unreadable(path, error) from error
    else:
        own_products = _join(model, checks)
    if (dtype := default_dtype()) is not None:
        model.set_dtype(dtype)
    _read_weights(path, model, progress, at_once or READ_BYTES)
    return replace(
        opened,
        weights_bytes=sum(array.nbytes for array in _weights(model)),
        own_products=own_products,
    )


def _join(model: Any, checks: Checks | None) -> bool:
    """Join a model's layers on accelerators; return whether kvd's own products are used."""
    if on_cpu():
        return False
    product = products.find(joined_linear.dtype_of(model), checks)
    joined_linear.join(model, product)
    return product is not None


def _weights(model: Any) -> list[mx.array]:
    parameters = [array for _, array in tree_flatten(model.parameters())]
    return [*parameters, *packed_arrays(model), *joined_linear.joined_arrays(model)]


def _read_weights(path: Path, model: Any, progress: ReportProgress, at_once: int) -> None:
    arrays = _weights(model)
    total = sum(array.nbytes for array in arrays) or 1
    done, pending, batch = 0, 0, []
    try:
        for array in arrays:
            batch.append(array)
            pending += array.nbytes
            if pending >= at_once or array is arrays[-1]:
                mx.eval(batch)
                done, pending, batch = done + pending, 0, []
                progress("weights", done / total)
    except RuntimeError as error:
        raise _unreadable(path, error) from error
    mx.clear_cache()  # buffers of converted weights


def _context_length(config: dict[str, Any], tokenizer: Any) -> int:
    if (given := model_folder.context_length(config)) is not None:
        return given
    found = getattr(tokenizer, "model_max_length", None)
    # transformers uses 1e30 for "unknown".
    return int(found) if isinstance(found, int) and 0 < found < 10**9 else DEFAULT_CONTEXT


def _logits_of(model: Any) -> int | None:
    """Return how many logits a model has, by its output layer or embeddings; None: it has neither.

    Configurations may leave out a size that is the default of the model's class.
    """
    rows = {
        name.rpartition(".")[2]: int(module.weight.shape[0])
        for name, module in model.named_modules()
        if name.endswith(("lm_head", "embed_tokens")) and hasattr(module, "weight")
    }
    return rows.get("lm_head") or rows.get("embed_tokens")


def _setting(config: dict[str, Any], key: str) -> Any:
    """Return a setting of the language model; multimodal configurations nest it one level down."""
    return config.get(key) or (config.get("text_config") or {}).get(key)


def _unreadable(path: Path, error: RuntimeError) -> InvalidModel:
    return model_folder.invalid(path, f"has weights that cannot be read: {one_line(error)}")

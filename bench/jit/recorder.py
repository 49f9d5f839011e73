"""Replaces MLX's functions by ones that record the modules that CUDA needs for their results."""

from __future__ import annotations

import functools
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

INDEXING = ("take", "take_along_axis", "put_along_axis", "gather_qmm", "quantized_matmul")
SINGLE = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
"""Functions of `mx.fast` that are one operation on CUDA and many on the CPU."""
_REDUCTIONS = ("Max", "Min", "Sum", "Prod", "Assign")
_SLICE_REDUCTIONS = ("Maximum", "Minimum", "Add", "Multiply")
_NODE = re.compile(r'\{ (\d+) \[label ="([\w ]+)", shape=rectangle\]; \}')
_EDGE = re.compile(r'^("\w+"|\d+) -> ("\w+"|\d+)$', re.MULTILINE)
_SINK = re.compile(r'\{ rank=sink; ("\w+"); \}')
_MARK = "AsStrided"
"""The operation at the borders of what replaces a kernel; kvd's own code does not use it."""

Keys = dict[str, list[str]]
"""Keys of modules by phase."""


class Recorder:
    """Records the keys of each phase, except those of an earlier one."""

    def __init__(self) -> None:
        self.found: Keys = {}
        self._phases: list[str] = []
        self._hidden = 0
        self._known: dict[Any, list[str]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        self.found.setdefault(name, [])
        try:
            yield
        finally:
            self._phases.pop()

    @property
    def phases(self) -> Sequence[str]:
        return self._phases

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Record nothing in this context."""
        self._hidden += 1
        try:
            yield
        finally:
            self._hidden -= 1

    def record(self, what: Any, arrays: Sequence[Any], keys: Callable[..., list[str]]) -> None:
        """Record ``keys`` of placeholders for ``arrays``, once per ``what``, shapes and dtypes."""
        if self._hidden or not self._phases:
            return
        name = what, tuple((tuple(array.shape), array.dtype) for array in arrays)
        with self.hidden():
            if name not in self._known:
                self._known[name] = keys(*(mx.zeros(one.shape, one.dtype) for one in arrays))
        known = {key for keys in self.found.values() for key in keys}
        self.found[self._phases[-1]] += [key for key in self._known[name] if key not in known]

    def called(self, name: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and record the keys of its graph."""

        def keys(*arrays: Any) -> list[str]:
            def build(*new: Any) -> list[Any]:
                left = iter(new)
                again, named = _mapped((args, kwargs), lambda _array: next(left))
                found = function(*again, **named)
                return [again[0] if found is None else found]  # `__setitem__` changes its array

            return keys_of(build, *arrays)

        self.record((name, _shape_of((args, kwargs))), _arrays_in([args, kwargs]), keys)
        return function(*args, **kwargs)


def key_of(node: dict[str, Any]) -> str | None:
    """Return the key of a node of an exported graph; None if MLX need not compile it."""
    given = [_name(dtype) for *_, dtype in node["inputs"]]
    made, how = _name(node["outputs"][0][2]), node["arguments"]
    found = None
    match node["name"]:
        case "Gather" if len(given) > 1:
            found = f"gather_{made}_{given[1]}_{len(given) - 1}"
        case "GatherAxis":
            found = f"gather_axis_{made}_{given[1]}"
        case "Scatter":
            found = f"scatter_{made}_{given[1]}_{_REDUCTIONS[how[0]]}_{len(given) - 2}"
        case "ScatterAxis":
            found = f"scatter_axis_{made}_{given[1]}_{'Sum' if how[0] == 0 else 'Assign'}"
        case "SliceUpdate" if how[0] < len(_SLICE_REDUCTIONS):
            found = f"slice_update_{_SLICE_REDUCTIONS[how[0]]}_{made}"
        case "MaskedScatter":
            found = f"masked_scatter_{made}"
        case "GatherQMM" | "QuantizedMatmul" as product:
            group, bits, _, transposed = how[:4]
            found = f"{product}_{'t' if transposed else 'n'}_{made}_b{bits}_g{group}"
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("mlx.core.")


def keys_of(build: Callable[..., Any], *arrays: Any) -> list[str]:
    """Return the keys of the graph that ``build(*arrays)`` creates."""
    found: dict[str, None] = {}

    def see(node: dict[str, Any]) -> None:
        if node["type"] == "primitive" and (key := key_of(node)) is not None:
            found[key] = None

    mx.export_function(see, build, *arrays)
    return list(found)


def fused_in(outputs: Sequence[Any]) -> list[str]:
    """Return the names of the fused operations that outputs need, except those between marks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.dot")
        mx.export_to_dot(str(file), *outputs)
        text = file.read_text("utf-8")
    labels = dict(_NODE.findall(text))
    before: dict[str, list[str]] = defaultdict(list)
    for source, target in _EDGE.findall(text):
        before[target].append(source)
    left = [(name, False) for name in _SINK.findall(text)]
    seen, found = set(left), set()
    while left:
        name, inside = left.pop()
        label = labels.get(name, "")
        if label == _MARK:
            inside = not inside
        elif label.startswith("Compiled") and not inside:
            found.add(label)
        new = {(one, inside) for one in before[name]} - seen
        seen |= new
        left += new
    return sorted(found)


def _arrays_in(tree: Any) -> list[Any]:
    """Return the arrays in nested lists, tuples and dictionaries."""
    if isinstance(tree, mx.array):
        return [tree]
    parts = list(tree.values()) if isinstance(tree, dict) else tree
    return [one for part in parts for one in _arrays_in(part)] if _nests(parts) else []


def _nests(tree: Any) -> bool:
    return isinstance(tree, (list, tuple))


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of lists, tuples, dictionaries and dataclasses with other arrays."""
    if isinstance(tree, mx.array):
        return change(tree)
    if isinstance(tree, dict):
        return {name: _mapped(one, change) for name, one in tree.items()}
    if _nests(tree):
        return type(tree)(_mapped(one, change) for one in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        given = {one.name: getattr(tree, one.name) for one in fields(tree)}
        return replace(tree, **{name: _mapped(one, change) for name, one in given.items()})
    return tree


def _shape_of(tree: Any) -> str:
    """Return everything in nested arguments except arrays."""
    return repr(_mapped(tree, lambda _array: None))


class _At:
    """Replaces ``array.at``."""

    def __init__(self, recorder: Recorder, original: Any, array: Any, where: Any = None) -> None:
        self._given = recorder, original, array
        self._where = where

    def __getitem__(self, where: Any) -> _At:
        return _At(*self._given, where)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        recorder, original, array = self._given

        def call(first: Any, where: Any, value: Any) -> Any:
            return getattr(original.fget(first)[where], name)(value)

        return lambda value: recorder.called(("at", name), call, array, self._where, value)


class Patched:
    """MLX's functions, replaced by ones that record."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._compile = mx.compile
        self._opaque = False
        """Whether an opaque function is being called."""
        self._traces = 0
        """Compiled functions that are being called."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions in this context. Enter it before `mlx.nn` is imported."""
        with ExitStack() as stack:
            for name in INDEXING:
                stack.enter_context(mock.patch.object(mx, name, self._seen(getattr(mx, name))))
            for name in ("__getitem__", "__setitem__"):
                item = self._item(name, getattr(mx.array, name))
                stack.enter_context(mock.patch.object(mx.array, name, item))
            at = mx.array.at
            hooked = property(lambda array: _At(self._recorder, at, array))
            stack.enter_context(mock.patch.object(mx.array, "at", hooked))
            for name in SINGLE:
                one = self.opaque(getattr(mx.fast, name))
                stack.enter_context(mock.patch.object(mx.fast, name, one))
            stack.enter_context(mock.patch.object(mx, "dequantize", self.opaque(mx.dequantize)))
            stack.enter_context(mock.patch.object(mx, "compile", self.compile))
            yield

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose own operations are ignored."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._opaque:
                return function(*args, **kwargs)
            self._opaque = True
            try:
                with self._recorder.hidden():
                    args, kwargs = _mapped((args, kwargs), mx.as_strided)
                    return _mapped(function(*args, **kwargs), mx.as_strided)
            finally:
                self._opaque = False

        return call

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._recorder.called(function.__name__, function, *args, **kwargs)

        return call

    def _item(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(array: Any, where: Any, *value: Any) -> Any:
            if not _arrays_in([where]):  # slices and numbers need no indices
                return function(array, where, *value)
            return self._recorder.called(name, function, array, where, *value)

        return call

    def compile(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace `mx.compile`."""
        if function is None:
            return functools.partial(self.compile, *args, **kwargs)
        compiled = self._compile(function, *args, **kwargs)

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._traces:  # its operations become part of the outer function
                return compiled(*args, **kwargs)
            self._traces += 1
            try:
                found = compiled(*args, **kwargs)
            finally:
                self._traces -= 1

            def keys(*new: Any) -> list[str]:
                left = iter(new)
                again, named = _mapped((args, kwargs), lambda _array: next(left))
                return fused_in(_arrays_in([compiled(*again, **named)]))

            what = id(compiled), _shape_of((args, kwargs))
            self._recorder.record(what, _arrays_in([args, kwargs]), keys)
            return found

        return call

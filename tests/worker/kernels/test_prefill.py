"""The kernels of prefill passes, in both languages, compared with plain computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.chunk_tiles import ChunkPlaces, empty_tiles
from kvd.worker.attention.kernels.arguments import (
    Attend,
    Pack,
    PassTokens,
    PutTails,
    Rotation,
    Spread,
    TileSplits,
    Unpack,
)
from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.attention.kernels.launch_prefill import (
    attend_launch,
    combine_launch,
    pack_launch,
    put_tails_launch,
    spread_launch,
    unpack_launch,
)
from kvd.worker.attention.kernels.unpack import WRITTEN
from kvd.worker.cache.backend import schemes_of
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from protocol.pages import TAIL_TOKENS
from tests.breadth import ALL
from tests.worker.kernels import build
from tests.worker.kernels.run import check_rules, run
from tests.worker.kernels.test_rotate import rotated_in_float64
from tests.worker.kernels.wrap import wrap

pytestmark = pytest.mark.mlx

Run = Callable[[Callable[[Language, Any], Launch], Any], list[np.ndarray]]
"""Runs the launch that a function makes of its arguments."""
PLACES, TAILS = 150, 3
BOUNDS = {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Bounds of relative errors: twice the rounding of results, and in float32 that of angles."""


def noise(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.fixture(params=[METAL, CUDA], ids=["metal", "cuda"])
def run_launch(request: pytest.FixtureRequest) -> Run:
    def made(make: Callable[[Language, Any], Launch], given: Any) -> list[np.ndarray]:
        launch = make(request.param, given)
        if request.param is METAL:
            check_rules(launch)
        return run(launch, request.param.name)

    return made


@dataclass(frozen=True)
class Case:
    dtype: mx.Dtype
    heads: int
    k_dim: int
    v_dim: int
    scheme: Scheme

    @property
    def geometry(self) -> LayerGeometry:
        return LayerGeometry(self.heads, self.k_dim, self.v_dim, self.dtype.size)

    def tokens(self) -> PassTokens:
        shapes = (PLACES, self.heads), (TAILS, self.heads, TAIL_TOKENS)
        return PassTokens(
            *(noise(*shapes[0], dim, dtype=self.dtype) for dim in (self.k_dim, self.v_dim)),
            *(noise(*shapes[1], dim, dtype=self.dtype) for dim in (self.k_dim, self.v_dim)),
        )

    def pool(self) -> PagePool:
        return PagePool(self.geometry, self.scheme, self.dtype)


CASES = {
    "k8v8": Case(mx.bfloat16, 2, 128, 128, Scheme(8, 8)),
    "k4v4": Case(mx.float16, 1, 64, 64, Scheme(4, 4)),
    "k5v3": Case(mx.bfloat16, 2, 64, 128, Scheme(5, 3)),
    "k6v2, other head sizes": Case(mx.float32, 3, 96, 64, Scheme(6, 2)),
    "k3v6, groups of 32": Case(mx.float16, 1, 80, 96, Scheme(3, 6, 32, 32)),
    "values per channel": Case(mx.bfloat16, 2, 80, 80, Scheme(4, 4)),
    "dense": Case(mx.bfloat16, 2, 64, 64, Scheme(16, 16)),
    "dense values": Case(mx.float16, 1, 64, 64, Scheme(8, 16)),
}

LEVELS = [Case(mx.bfloat16, 2, 64, 64, Scheme(*bits)) for bits in ((16, 16), (8, 4))]


def looked_up(tokens: PassTokens, places: Sequence[int], side: int) -> np.ndarray:
    """Return the vectors at places, ``[places, heads, dim]``."""
    own = wide((tokens.keys, tokens.values)[side])
    tails = wide((tokens.tail_keys, tokens.tail_values)[side])
    return np.stack(
        [
            own[place] if place >= 0 else tails[~place // TAIL_TOKENS, :, ~place % TAIL_TOKENS]
            for place in places
        ]
    )


def some_places(count: int, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    return [
        int(draw.integers(PLACES))
        if draw.random() < 0.7
        else ~int(draw.integers(TAILS * TAIL_TOKENS))
        for _ in range(count)
    ]


def check_pack(run_launch: Run, case: Case, *, like_mlx: bool = True) -> None:
    """``like_mlx``: whether to compare quantized pages with those of `mx.quantize`.

    MLX's kernels for GPUs may use another range for a group; see `kernels.pack`.
    """
    tokens, pool = case.tokens(), case.pool()
    places, kept = some_places(3 * PAGE_TOKENS, 1), some_places(70, 2)
    found = run_launch(
        pack_launch,
        Pack(tokens, mx.array(places, mx.int32), schemes_of([pool]), mx.array(kept, mx.int32)),
    )
    *packed, kept_keys, kept_values = found
    assert np.array_equal(kept_keys, looked_up(tokens, kept, 0))
    assert np.array_equal(kept_values, looked_up(tokens, kept, 1))
    dense = [
        mx.array(looked_up(tokens, places, side), mx.float32)
        .reshape(3, PAGE_TOKENS, case.heads, -1)
        .swapaxes(1, 2)
        for side in (0, 1)
    ]
    packings = pool.key_packing, pool.value_packing
    for want, packing in zip(
        pool.pack(*(side.astype(case.dtype) for side in dense)), packings, strict=True
    ):
        got, packed = packed[: len(want)], packed[len(want) :]
        if packing.bits == 16:
            assert np.array_equal(got[0], wide(want[0]))
            continue
        if not like_mlx:
            continue
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert np.abs(mine - wide(theirs)).max() <= BOUNDS[case.dtype] * np.abs(mine).max()
        codes, expected = (unpacked(words, packing.bits) for words in (got[0], np.array(want[0])))
        assert np.abs(codes - expected).max() <= 1
        assert (codes != expected).mean() < 0.01
    assert not packed


def check_precision(run_launch: Run, case: Case) -> None:
    """Groups may be far from zero, on either side. Errors are at most a step of their range.

    Half a step is rounding. As the scale divides one end of the range, the other may be cut.
    """
    tokens = case.tokens()
    shift = mx.array([-30.0, 30.0, 0.0, 0.0] * 64).astype(case.dtype)
    shifted = PassTokens(
        *(
            side + (shift[: side.shape[-1]] if number % 2 == 0 else shift[0])
            for number, side in enumerate(
                (tokens.keys, tokens.values, tokens.tail_keys, tokens.tail_values)
            )
        )
    )
    pool, places = case.pool(), some_places(PAGE_TOKENS, 5)
    given = Pack(shifted, mx.array(places, mx.int32), schemes_of([pool]), mx.array([0], mx.int32))
    *packed, _, _ = run_launch(pack_launch, given)
    for side, packing in enumerate((pool.key_packing, pool.value_packing)):
        count = 1 if packing.bits == 16 else 3
        arrays, packed = packed[:count], packed[count:]
        if packing.bits == 16:
            continue
        dense = looked_up(shifted, places, side).transpose(1, 0, 2)  # [heads, 64, dim]
        dense = dense if packing.per_token else dense.swapaxes(1, 2)
        groups = dense.reshape(*dense.shape[:2], -1, packing.group)
        words, scales, biases = arrays
        codes = unpacked(words[0], packing.bits).reshape(groups.shape)
        found = codes * scales[0][..., None] + biases[0][..., None]
        step = (groups.max(-1) - groups.min(-1)) / (2**packing.bits - 1)
        rounding = BOUNDS[case.dtype] * np.abs(groups).max(-1)
        assert (np.abs(found - groups).max(-1) <= step + rounding).all()


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of packed words, the lowest bits of the first word first."""
    flags = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    numbers = flags.reshape(*flags.shape[:-1], -1, bits)
    found: np.ndarray = (numbers.astype(np.int64) << np.arange(bits)).sum(-1)
    return found


def written_by_unpack(language: Language, given: Unpack) -> Launch:
    """Return the launch of `unpack` with the arrays that it writes as outputs."""
    launch = unpack_launch(language, given)
    arrays = dict(zip(launch.input_names, launch.inputs, strict=True))
    written = [arrays.pop(name) for name in WRITTEN]
    return replace(
        launch,
        input_names=tuple(arrays),
        inputs=list(arrays.values()),
        output_names=(*WRITTEN, *launch.output_names),
        output_shapes=[*(array.shape for array in written), *launch.output_shapes],
        output_dtypes=[*(array.dtype for array in written), *launch.output_dtypes],
    )


def check_unpack(run_launch: Run, cases: Sequence[Case]) -> None:
    """``cases`` differ in their schemes only: they are the levels."""
    case, tokens = cases[0], cases[0].tokens()
    pools = [one.pool() for one in cases]
    for number, pool in enumerate(pools):
        shapes = ((4, case.heads, PAGE_TOKENS, dim) for dim in (case.k_dim, case.v_dim))
        pool.keys, pool.values = pool.pack(
            *(noise(*shape, dtype=case.dtype) + number for shape in shapes)
        )
        pool.keys, pool.values = (
            tuple(map(mx.contiguous, side)) for side in (pool.keys, pool.values)
        )
    # A row: pages 3 and 1, 70 tokens. Another: page 2 of the last level, 5 tokens.
    pages = [(0, 3, 0), (len(pools) - 1, 1, 64), (len(pools) - 1, 2, 198)]
    places = some_places(75, 3)
    rows = [*range(128, 198), *range(262, 267)]
    found = run_launch(
        written_by_unpack,
        Unpack(
            tokens,
            *(mx.zeros((267, case.heads, dim), case.dtype) for dim in (case.k_dim, case.v_dim)),
            tokens.keys,
            mx.array(pages, mx.int32),
            [array for pool in pools for array in pool.arrays()],
            *schemes_of(pools),
            mx.array([*zip(places, rows, strict=True)], mx.int32),
        ),
    )
    for side, got in enumerate(found[:2]):
        assert np.isfinite(got).all()
        for level, slot, row in pages:
            dense = wide(pools[level].read(mx.array([slot]))[side])[0].swapaxes(0, 1)
            mine = got[row : row + PAGE_TOKENS]
            assert np.abs(mine - dense).max() <= BOUNDS[case.dtype] * np.abs(dense).max()
        assert np.array_equal(got[rows], looked_up(tokens, places, side))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_packed_pages_are_those_of_mlx(run_launch: Run, case: Case) -> None:
    check_pack(run_launch, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_packed_pages_are_precise_far_from_zero(run_launch: Run, case: Case) -> None:
    check_precision(run_launch, case)


def test_a_pass_that_fills_no_page_only_copies_tokens(run_launch: Run) -> None:
    tokens = CASES["k8v8"].tokens()
    kept = some_places(5, 4)
    found = run_launch(pack_launch, Pack(tokens, None, ([], []), mx.array(kept, mx.int32)))
    for side, got in enumerate(found):
        assert np.array_equal(got, looked_up(tokens, kept, side))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_dense_pages_are_those_of_mlx(run_launch: Run, case: Case) -> None:
    check_unpack(run_launch, [case])


def test_dense_pages_of_several_levels(run_launch: Run) -> None:
    check_unpack(run_launch, LEVELS)


def test_chunks_without_pages_only_copy_tokens(run_launch: Run) -> None:
    tokens = CASES["k8v8"].tokens()
    dense = (mx.zeros((2, 2, 128), mx.bfloat16) for _ in range(2))
    copied = mx.array([(~5, 1), (7, 0)], mx.int32)
    given = Unpack(tokens, *dense, tokens.keys, None, [], [], [], copied)
    for side, got in enumerate(run_launch(written_by_unpack, given)[:2]):
        assert np.array_equal(got, looked_up(tokens, [7, ~5], side))


def check_spread(run_launch: Run, rotation: Rotation, k_dim: int, dtype: mx.Dtype) -> None:
    q_heads, kv_heads, v_dim = 6, 2, 64
    offsets = mx.array([0, 4097, 77, 31], mx.int32)
    weights = tuple(noise(k_dim, dtype=dtype) + shift for shift in (1, 2))
    frequencies = 1e4 ** (-np.arange(rotation.dims // 2) / (rotation.dims // 2))
    qkv = noise(4, q_heads * k_dim + kv_heads * (k_dim + v_dim), dtype=dtype)
    given = Spread(
        rotation,
        qkv,
        q_heads,
        kv_heads,
        (k_dim, v_dim),
        offsets,
        mx.array(frequencies, mx.float32),
        weights if rotation.normed else None,
    )
    found = run_launch(spread_launch, given)
    ends = [q_heads * k_dim, (q_heads + kv_heads) * k_dim]
    queries, keys, values = mx.split(qkv, ends, axis=-1)
    wanted = [
        rotated_in_float64(given, queries, q_heads, 0),
        rotated_in_float64(given, keys, kv_heads, 1),
        wide(values).reshape(4, kv_heads, v_dim),
    ]
    for got, want in zip(found, wanted, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - want.reshape(got.shape)).max() <= BOUNDS[dtype] * np.abs(want).max()


SPREAD = {
    "plain": (Rotation(80, traditional=False), 80, mx.float32),
    "normed": (Rotation(128, False, True, 1e-6), 128, mx.bfloat16),
    "partial, traditional": (Rotation(64, True, True, 1e-3), 96, mx.float16),
}


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD.keys())
def test_spread_vectors_match_float64(run_launch: Run, case: tuple[Any, ...]) -> None:
    check_spread(run_launch, *case)


@dataclass(frozen=True)
class Shape:
    """Sizes of a pass, and how many tokens its chunks have and see."""

    dtype: mx.Dtype
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    chunks: tuple[tuple[int, int, int, int], ...]
    """Tokens; tokens of the batch before them that they see; keys in two runs of copies."""


ATTENDED = {
    "one token": Shape(mx.bfloat16, 2, 2, 64, 64, ((1, 0, 0, 0),)),
    "groups of 2": Shape(mx.bfloat16, 2, 1, 128, 128, ((65, 0, 0, 0), (33, 64, 64, 0))),
    "groups of 16": Shape(mx.float16, 16, 1, 64, 128, ((9, 0, 64, 63), (5, 9, 128, 65))),
    "groups of 3": Shape(mx.bfloat16, 6, 2, 96, 80, ((22, 0, 1, 1), (1, 22, 65, 0))),
    "groups of 7": Shape(mx.float16, 7, 1, 80, 96, ((10, 0, 0, 127), (19, 10, 192, 0))),
    "no groups": Shape(mx.bfloat16, 3, 3, 32, 16, ((63, 0, 0, 0), (64, 63, 64, 0), (2, 66, 0, 0))),
}


def check_attend(
    run_launch: Run, shape: Shape, *, warpgroups: bool = False, splits: int = 0
) -> np.ndarray:
    """Compare with float64; return the result.

    ``splits``: of each chunk; 0: the tiles write the result themselves.
    """
    padding, vectors = 5, 128 if warpgroups else 64
    batch = sum(count for count, *_ in shape.chunks) + padding
    copies = max(1, sum(one + two for _, _, one, two in shape.chunks))
    queries, keys, values, dense_keys, dense_values = (
        noise(tokens, heads, dim, dtype=shape.dtype) * 3
        for tokens, heads, dim in (
            (batch, shape.q_heads, shape.k_dim),
            (batch, shape.kv_heads, shape.k_dim),
            (batch, shape.kv_heads, shape.v_dim),
            (copies + 1, shape.kv_heads, shape.k_dim),
            (copies + 1, shape.kv_heads, shape.v_dim),
        )
    )
    tiles, rows, wanted = list[tuple[int, ...]](), dict[int, tuple[int, int]](), []
    end, copied, entries = 0, 0, 0
    each = vectors * shape.kv_heads // shape.q_heads
    for count, before, one, two in shape.chunks:
        result = batch - padding - end - count
        runs = copied, one, copied + one, two
        chunk = ChunkPlaces(end, result, count, before, *runs, entries if splits else -1)
        tiles += chunk.tiles(each, max(1, splits))
        for token in range(count):
            rows[result + token] = entries + token * splits, entries + (token + 1) * splits
        entries += count * splits
        seen = [
            np.concatenate([wide(dense)[copied : copied + one + two], wide(own)[end - before :]])
            for dense, own in ((dense_keys, keys), (dense_values, values))
        ]
        wanted.insert(0, attended(wide(queries)[end : end + count], *seen, one + two + before))
        end, copied = end + count, copied + one + two
    found = None
    if splits:
        bounds = [(*[0] * 6, *rows.get(token, (3, 3))) for token in range(batch)]
        found = TileSplits(entries, mx.array(bounds, mx.int32))
    else:
        tiles += empty_tiles(end, padding, 1)
    given = Attend(
        queries, keys, values, dense_keys, dense_values, mx.array([1], mx.int32),
        mx.array(tiles[::-1], mx.int32), found, batch, shape.k_dim**-0.5, warpgroups,
    )  # fmt: skip
    got, parts = run_launch(attend_launch, given)
    if splits:
        assert np.isfinite(parts).all()
        (got,) = run_launch(partial(combine_launch, parts=mx.array(parts)), given)
        got = got.reshape(batch, -1)
    want = np.concatenate(wanted)
    assert np.isfinite(got).all()
    assert np.abs(got[:end] - want).max() <= 2 * BOUNDS[shape.dtype] * np.abs(want).max()
    assert not got[end:].any()
    return got


def attended(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, before: int) -> np.ndarray:
    """Attend in float64; each query sees ``before`` keys, those of earlier queries, and its own."""
    group = queries.shape[1] // keys.shape[1]
    found = np.zeros((*queries.shape[:2], values.shape[2]))
    for token, head in np.ndindex(*queries.shape[:2]):
        seen = before + token + 1
        scores = keys[:seen, head // group] @ queries[token, head] * queries.shape[2] ** -0.5
        weights = np.exp(scores - scores.max())
        found[token, head] = weights @ values[:seen, head // group] / weights.sum()
    return found.reshape(len(queries), -1)


BOTH_WAYS = {"groups of 16", "no groups"}
"""Shapes with the most and the fewest heads in a group, and several chunks."""


@pytest.mark.parametrize(
    ("name", "warpgroups"),
    [
        (name, warpgroups)
        for number, name in enumerate(ATTENDED)
        for warpgroups in (False, True)
        if ALL or name in BOTH_WAYS or number % 2 == warpgroups
    ],
)
def test_chunks_attend_like_float64(name: str, warpgroups: bool) -> None:
    check_attend(on_cuda, ATTENDED[name], warpgroups=warpgroups)


def on_cuda(make: Callable[[Language, Any], Launch], given: Any) -> list[np.ndarray]:
    return run(make(CUDA, given), "cuda")


SPLIT = Shape(mx.bfloat16, 2, 1, 32, 16, ((33, 0, 192, 5), (2, 0, 64, 0)))
"""Into three splits, of which two have no key of the second chunk."""


def check_splits(run_launch: Run, *, warpgroups: bool = False) -> None:
    """With one split, all numbers are those without."""
    whole, one, three = (
        check_attend(run_launch, SPLIT, warpgroups=warpgroups, splits=splits)
        for splits in (0, 1, 3)
    )
    assert np.array_equal(one, whole)
    assert not np.array_equal(three, whole)


@pytest.mark.parametrize("warpgroups", [False, True], ids=["warps", "warpgroups"])
def test_splits_of_chunks_are_combined(warpgroups: bool) -> None:
    check_splits(on_cuda, warpgroups=warpgroups)


def check_tails(run_launch: Run, dtype: mx.Dtype) -> None:
    tails = [noise(3, 2, TAIL_TOKENS, dim, dtype=dtype) for dim in (64, 96)]
    kept = [noise(135, 2, dim, dtype=dtype) for dim in (64, 96)]
    starts = [(127, 8), (0, 0), (0, 127)]
    given = PutTails(*tails, *kept, mx.array(starts, mx.int32))
    for got, old, new in zip(run_launch(put_tails_launch, given), tails, kept, strict=True):
        want = wide(old)
        for tail, (first, count) in enumerate(starts):
            want[tail, :, :count] = wide(new)[first : first + count].swapaxes(0, 1)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bfloat16", "float32"])
def test_new_tails_replace_the_first_tokens_of_their_rows(run_launch: Run, dtype: mx.Dtype) -> None:
    check_tails(run_launch, dtype)


@pytest.mark.skipif(build.find_clang() is None, reason="needs clang++ 17 or newer")
def test_clang_accepts_the_address_spaces_of_the_texts() -> None:
    case = CASES["k5v3"]
    tokens, pool = case.tokens(), case.pool()
    places, kept = (mx.array(some_places(count, 1), mx.int32) for count in (128, 9))
    schemes = schemes_of([pool])
    launches = [
        pack_launch(METAL, Pack(tokens, places, schemes, kept)),
        unpack_launch(
            METAL,
            Unpack(
                tokens, tokens.keys, tokens.values, tokens.keys, mx.array([(0, 0, 0)], mx.int32),
                pool.arrays(), *schemes, mx.array([(0, 69)], mx.int32),
            ),
        ),
    ]  # fmt: skip
    assert [build.refused_by_clang(wrap(launch, "metal")) for launch in launches] == ["", ""]

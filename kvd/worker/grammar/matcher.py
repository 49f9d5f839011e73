"""The state of one completion in its grammar, and the masks of several completions.

A mask has a bit for each token of the vocabulary, packed into bytes, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from kvd.worker.lean_imports import np
from protocol.errors import InvalidRequest, KvdError, Overloaded, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mask: TypeAlias = "NDArray[np.uint8]"


def shown(reason: str) -> str:
    """Return a reason of llguidance in one short line."""
    return shorten(" ".join(reason.replace("<non-verbose/>", "").split()), 300)


class Matcher:
    """One completion's state: call `push` for each of its tokens.

    ``grammar``: an `LLMatcher` at the grammar's beginning, which the matcher owns.

    While a thread advances the matcher (`kvd.worker.grammar.mask_threads`), only `push` may be
    called. An error of llguidance ends the matcher, and is its `failure`: no method raises it.
    """

    def __init__(
        self, grammar: Any, eos_ids: frozenset[int], vocabulary: int, *, optional: bool = False
    ) -> None:
        self.grammar: Any = grammar
        self.optional = optional
        """Whether the completion goes on without the grammar if that cannot be followed."""
        self.vocabulary = vocabulary
        """Tokens of the tokenizer."""
        self.mask: Mask | None = None
        """The mask of the next token, if it was computed already."""
        self.buffer: tuple[Mask, int, int] | None = None
        """Memory of the masks, as `MaskFiller` needs it: an array, its address and its bytes."""
        self.first: Mask | None = None
        """The mask of the first token over the tokenizer's tokens, from the compilation."""
        self.nbytes = 0
        """Bytes of the grammar, as measured at its compilation."""
        self._ended_by: KvdError | None = None
        """Why the grammar is followed no further, if kvd has decided that."""
        self._eos_ids = eos_ids
        self._ahead: int | None = None
        """A token that the matcher advanced by before `push`."""
        self.seconds = 0.0
        """CPU seconds of the last token and its mask. They at most double with each, because most
        masks take microseconds and a few take milliseconds."""
        self.lent = False
        """Whether a thread advances the matcher."""
        self._pushed: list[int] = []
        """Tokens that were pushed meanwhile."""
        self._cleared: dict[tuple[Collection[int], bool], list[tuple[int, int]]] = {}
        """By the arguments of `limit`: bytes of a mask, and the bits of each that stay."""

    def push(self, token: int) -> None:
        """Advance by a token that the mask allowed."""
        if self.lent:
            self._pushed.append(token)
            return
        if self._ahead == token:
            self._ahead = None
            return
        self._consume(token)

    def push_ahead(self, token: int) -> None:
        """Advance by a token that was drawn; `push` follows, or `settle` if the draw is dropped."""
        if self._consume(token):
            self._ahead = token

    def _consume(self, token: int) -> bool:
        """Advance by a token after the last pushed one; return whether that changed the state."""
        self.settle()
        self.mask = self.first = None
        if self._ended_by is not None:
            return False
        try:
            return not self.grammar.is_stopped() and bool(self.grammar.consume_token(token))
        except BaseException as error:  # noqa: BLE001 - panics of Rust derive from it
            self.end(error)
            return False

    def lend(self) -> None:
        """Leave the matcher to a thread until `take_back`."""
        self.lent = True

    def take_back(self) -> None:
        """Note that the thread is done, and advance by the tokens that were pushed meanwhile."""
        self.lent = False
        pushed, self._pushed = self._pushed, []
        for token in pushed:
            self.push(token)

    def settle(self) -> None:
        """Return to the state after the last pushed token."""
        if self._ahead is None:
            return
        self._ahead = self.mask = None
        try:
            self.grammar.rollback(1)
        except BaseException as error:  # noqa: BLE001 - panics of Rust derive from it
            self.end(error)

    @property
    def failed(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        return self._ended_by is not None or bool(self.grammar.is_error())

    def give_up(self) -> None:
        """Follow the grammar no further, because memory is short."""
        self._end(
            Overloaded(
                "memory is too short to follow the grammar; retry later, or simplify it",
                retry_after_s=1.0,
            )
        )

    def end(self, error: BaseException) -> None:
        """Follow the grammar no further, because a method of it has raised ``error``.

        Raises it again if it is none of the grammar's.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        if isinstance(error, MemoryError):
            self.give_up()
        else:
            self._end(_unfollowable(f"{type(error).__name__}: {error}"))

    def _end(self, why: KvdError) -> None:
        self._ended_by = self._ended_by or why
        self._ahead = self.mask = self.first = None

    @property
    def complete(self) -> bool:
        """Whether the answer matches and no token may continue it. Computes a mask."""
        try:
            return self._is_complete()
        except BaseException as error:  # noqa: BLE001 - panics of Rust derive from it
            self.end(error)
            return False

    def _is_complete(self) -> bool:
        if self.failed or not self.grammar.is_accepting():
            return False
        if self.mask is not None:
            mask = self.mask.copy()
        else:
            mask = np.frombuffer(bytearray(self.grammar.compute_bitmask()), np.uint8)
        self.limit(mask, (), may_end=True)
        return self.grammar.is_stopped() or not mask.any()

    def limit(self, mask: Mask, ends: Collection[int], *, may_end: bool) -> None:
        """Adjust the mask to the tokens that end the completion.

        ``ends``: these tokens, hashable. Other end tokens of the model are excluded: in a
        completion that ignores them they would be text. ``may_end``: False until ``min_tokens``.
        """
        cleared = self._cleared.get((ends, may_end))
        if cleared is None:
            excluded = self._eos_ids.difference(ends) if may_end else self._eos_ids.union(ends)
            cleared = [(token >> 3, 0xFF ^ (1 << (token & 7))) for token in excluded]
            self._cleared[ends, may_end] = cleared
        for place, bits in cleared:
            mask[place] &= bits

    def failure(self) -> KvdError | None:
        """Return why no token is allowed; None: the grammar is complete."""
        try:
            return self._failure()
        except BaseException as error:  # noqa: BLE001 - panics of Rust derive from it
            self.end(error)
            return self._ended_by

    def _failure(self) -> KvdError | None:
        if self._ended_by is not None:
            return self._ended_by
        if self.grammar.is_error():
            return _unfollowable(self.grammar.get_error())
        if self.grammar.is_accepting():
            return None
        return InvalidRequest(
            "no token of the model continues the answer by its grammar; change the grammar",
            field="grammar",
        )


def _unfollowable(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the grammar cannot be followed any further: {shown(reason)}; simplify it",
        field="grammar",
    )


class MaskFiller:
    """Computes masks for a model with ``vocabulary`` tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._words = (vocabulary + 31) // 32
        beyond = range(vocabulary, 32 * self._words)
        self._beyond = [(token >> 3, 0xFF ^ (1 << (token & 7))) for token in beyond]
        """Bytes and bits of tokens of the tokenizer for which the model has no logit."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one mask: whole words of 32 bits."""
        return 4 * self._words

    def fill(self, matchers: Sequence[Matcher | None], masks: Mask | None = None) -> Mask:
        """Return the masks, ``[matchers, bytes]``. All tokens are allowed without a matcher.

        A matcher that fails has an empty mask. Masks that were computed already are copied.
        ``masks``: memory of that shape, which is filled and returned.
        """
        if masks is None:
            masks = np.empty((len(matchers), self.row_bytes), np.uint8)
        for row, matcher in enumerate(matchers):
            if matcher is None:
                masks[row] = 0xFF
            else:
                masks[row] = self.compute(matcher)
        return masks

    def compute(self, matcher: Matcher) -> Mask:
        """Return `Matcher.mask`, computed if it is not known. Releases Python's lock meanwhile."""
        if matcher.mask is None:
            try:
                matcher.mask = self._computed(matcher)
            except BaseException as error:  # noqa: BLE001 - panics of Rust derive from it
                matcher.end(error)
                matcher.mask = self._computed(matcher)
        return matcher.mask

    def _computed(self, matcher: Matcher) -> Mask:
        if matcher.buffer is None:
            words = np.zeros(max(self._words, (matcher.vocabulary + 31) // 32), np.int32)
            mask: Mask = words.view(np.uint8)[: 4 * self._words]
            matcher.buffer = mask, words.ctypes.data, words.nbytes
        mask, address, nbytes = matcher.buffer
        if matcher.first is not None:
            count = min(matcher.first.size, mask.size)
            mask[:count] = matcher.first[:count]
        elif matcher.failed:
            mask[:] = 0
        else:
            matcher.grammar.unsafe_compute_mask_ptr(address, nbytes)
            if matcher.grammar.is_error():
                mask[:] = 0
        for place, bits in self._beyond:
            mask[place] &= bits
        return mask

"""Random requests over all settings, sent to a worker, and their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.embedding import EmbedOptions, vector_of
from protocol.tools import Grammar
from protocol.types import ChatMessage, Sampling
from protocol.worker import (
    CancelRow,
    ChoiceFinished,
    Reclaim,
    Reclaimed,
    RowCached,
    RowFailed,
    RowFinished,
    RowPreempted,
    RowTokens,
    StartLevel,
    Submit,
)

AT_ONCE = 12
METHODS = ("spare", "prefixes", "preempt")
"""Methods of reclaims that change no token."""
GRAMMARS = (
    Grammar("regex", "[a-d]{2,12}"),
    Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}'),
)
WORDS = ("One", "day", "the", "amber", "falcon", "waits", "beside", "a", "river")


def random_request(chance: random.Random, number: int) -> Submit:
    """Return a request with random settings; many share the beginning of their prompts."""
    rid = f"r{number}"
    if chance.random() < 0.05:
        tokens = _tokens(chance)
        return Submit(rid=rid, tokens=tokens, sampling=Sampling(seed=number), embed=EmbedOptions())
    has_grammar = chance.random() < 0.1
    return Submit(
        rid=rid,
        **_prompt(chance),
        sampling=_sampling(chance, number),
        max_tokens=chance.choice([1, 2, 8, 20, 70]),
        n=chance.choice([1, 1, 1, 2, 3]),
        stop=chance.choice([[], [], [], ["a"], ["the", "\n\n"]]),
        stop_tokens=[] if chance.random() < 0.8 else chance.sample(range(5, 500), 20),
        ignore_eos=chance.random() < 0.8,
        min_tokens=chance.choice([0, 0, 4]),
        grammar=chance.choice(GRAMMARS) if has_grammar else None,
        priority=chance.choice([0, 0, 1]),
        prefix_salt=chance.choice([None, None, "salt"]),
        logprobs=chance.choice([None, None, 0, 2]),
        prompt_logprobs=0 if chance.random() < 0.1 else None,
    )


def _tokens(chance: random.Random) -> list[int]:
    shared = [7 + 3 * place % 400 for place in range(chance.choice([0, 64, 256, 320]))]
    return shared + [chance.randrange(5, 500) for _ in range(chance.choice([1, 3, 40, 130]))]


def _prompt(chance: random.Random) -> dict:
    kind = chance.random()
    text = " ".join(chance.choice(WORDS) for _ in range(chance.choice([1, 5, 60])))
    if kind < 0.1:
        return {"prompt": text}
    if kind < 0.2:
        return {"messages": [ChatMessage("system", "Be brief."), ChatMessage("user", text)]}
    return {"tokens": _tokens(chance)}


def _sampling(chance: random.Random, seed: int) -> Sampling:
    return Sampling(
        temperature=chance.choice([0.0, 0.7, 1.0]),
        top_p=chance.choice([1.0, 0.9]),
        top_k=chance.choice([0, 20]),
        min_p=chance.choice([0.0, 0.0, 0.05]),
        seed=seed,
        logit_bias=chance.choice([{}, {}, {9: 4.0, 17: -100.0}]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        presence_penalty=chance.choice([0.0, 0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.0, 0.3]),
    )


@dataclass
class Answer:
    """What a worker reported for one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each choice."""
    levels: dict[int, list[int]] = field(default_factory=dict)
    """Precision level of each of these tokens."""
    prompt_levels: list[int] = field(default_factory=list)
    """Precision levels of a request without tokens."""
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """Why each choice ended."""
    vector: list[float] = field(default_factory=list)
    """Embedding."""
    reused_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache."""
    preemptions: int = 0
    is_cancelled: bool = False

    def take(self, report) -> None:
        """Add a report of this request."""
        match report:
            case RowTokens(choice=choice, tokens=tokens, level=level, text=text):
                self.tokens.setdefault(choice, []).extend(tokens)
                self.levels.setdefault(choice, []).extend([level] * len(tokens))
                self.texts[choice] = self.texts.get(choice, "") + text
            case ChoiceFinished(choice=choice, reason=reason):
                self.reasons[choice] = reason
            case RowCached(outcome=outcome):
                self.reused_tokens = outcome.reused_tokens
            case RowPreempted():
                self.preemptions += 1
            case RowFinished(reason=reason, usage=usage, embedding=embedding):
                self.reasons.setdefault(0, reason)
                self.is_cancelled |= reason == "cancelled"
                if embedding is not None:
                    self.vector, self.prompt_levels = vector_of(embedding), usage.levels
            case RowFailed(error=error):
                self.reasons = {0: error.code}

    def trusted(self, choice: int, level: int) -> int:
        """Return how many tokens of a choice were generated before it left this level."""
        levels = self.levels[choice]
        return next((at for at, own in enumerate(levels) if own != level), len(levels))

    def has_stepped_down(self, level: int) -> bool:
        return any(own != level for each in self._all_levels() for own in each)

    def _all_levels(self) -> list[list[int]]:
        return [self.prompt_levels, *self.levels.values()]


def difference(expected: Answer, found: Answer, level: int) -> str:
    """Return how an answer differs from that of one process at ``level``; empty if it does not.

    One process and a gang step rows down at different moments, so only the tokens before that are
    compared. Those of a cancelled request begin the expected ones.
    """
    for choice, tokens in found.tokens.items():
        count = found.trusted(choice, level)
        if tokens[:count] != expected.tokens.get(choice, [])[:count]:
            return f"choice {choice}: {tokens[:count]}, not {expected.tokens.get(choice)}"
    if found.has_stepped_down(level) or found.is_cancelled:
        return ""
    for name in ("tokens", "texts", "reasons"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name}: {getattr(found, name)}, not {getattr(expected, name)}"
    if len(found.vector) != len(expected.vector):
        return "the vector has another length"
    far = [abs(one - other) for one, other in zip(found.vector, expected.vector, strict=True)]
    return "" if max(far, default=0.0) < 1e-3 else f"the vector differs by {max(far)}"


class Traffic:
    """Sends requests to a worker, at most `AT_ONCE` at a time, and keeps the answers."""

    def __init__(self, worker, chance: random.Random | None = None, levels: int = 1) -> None:
        """``chance``: reclaim memory and cancel requests; ``levels``: precision levels."""
        self._worker = worker
        self._chance, self._levels = chance, levels
        self.answers: dict[str, Answer] = {}
        self._running: set[str] = set()
        self._reclaims = 0
        """Reclaims that have ended."""

    def run(self, requests: list[Submit], level: int) -> dict[str, Answer]:
        """Run requests whose rows start at this precision level; return their answers."""
        self._worker.send(StartLevel(level=level))
        waiting = list(reversed(requests))
        while waiting or self._running:
            while waiting and len(self._running) < AT_ONCE:
                request = waiting.pop()
                self.answers[request.rid] = Answer()
                self._running.add(request.rid)
                self._worker.send(request)
            before = len(self._running)
            if self._chance is not None:
                self._disturb(self._chance, level)
            self._worker.wait_for(lambda before=before: self._take() or len(self._running) < before)
        return {request.rid: self.answers[request.rid] for request in requests}

    def _disturb(self, chance: random.Random, level: int) -> None:
        """Now and then, cancel a request, or reclaim memory by some method."""
        if chance.random() < 0.05:
            self._worker.send(CancelRow(rid=chance.choice(sorted(self._running))))
        if chance.random() < 0.25:
            self._reclaim(chance.choice(METHODS), 1 << chance.randrange(12, 31))
        elif chance.random() < 0.05 and level + 1 < self._levels:
            lower = chance.randrange(level + 1, self._levels)
            self._reclaim("precision", 1 << chance.randrange(12, 22), lower)
            self._worker.send(StartLevel(level=level))

    def _reclaim(self, method: str, wanted_bytes: int, level: int = 0) -> None:
        before = self._reclaims
        command = Reclaim(seq=9, method=method, wanted_bytes=wanted_bytes, level=level)
        self._worker.send(command)
        self._worker.wait_for(lambda: self._take() or self._reclaims > before)

    def _take(self) -> None:
        """Move the worker's reports into the answers."""
        for report in self._worker.reports:
            self._reclaims += isinstance(report, Reclaimed)
            answer = self.answers.get(getattr(report, "rid", ""))
            if answer is not None:
                answer.take(report)
            if isinstance(report, (RowFinished, RowFailed)):
                self._running.discard(report.rid)
        self._worker.reports.clear()
        self._worker._ends.clear()

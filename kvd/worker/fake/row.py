"""The completions of one request in the fake engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.worker.answer.call_ids import call_id
from kvd.worker.core.replay import SentText, finish_replayed
from kvd.worker.fake.pages import Pages
from kvd.worker.fake.script import Begins, ScriptedToken, script_of
from kvd.worker.fake.tokens import VOCABULARY, FakeTokens, word
from kvd.worker.prefix.cache import TrackedPrompt
from kvd.worker.text.choices import Choices
from kvd.worker.text.stops import StopFilter
from protocol.cache_outcome import RowCached
from protocol.errors import EmptyPrompt, InvalidRequest
from protocol.messages import FinishReason
from protocol.parts import PartStart
from protocol.types import ChatMessage
from protocol.worker import Report, RowPrompt, RowTokens, Submit, Tokenize

_PROMPT_LOGPROBS = 256
"""Prompt tokens whose logprobs go into one report."""


@dataclass
class FakeChoice:
    """One completion."""

    number: int
    stops: StopFilter
    script: list[ScriptedToken] | None = None
    tokens: int = 0
    text_bytes: int = 0
    """Bytes of all text so far, in UTF-8."""
    new_parts: list[PartStart] = field(default_factory=list)
    """Parts that begin in the text that is not reported yet."""
    sent_text: SentText = field(default_factory=SentText)


@dataclass
class FakeRow:
    """One request. ``eos_after``: as in `FakeModel`."""

    submit: Submit
    max_new: int
    eos_after: int
    source: FakeTokens
    tracked: TrackedPrompt
    pages: Pages
    over: Choices
    choices: list[FakeChoice] = field(init=False)
    """The choices that still run."""
    holds_pages: bool = False
    """Whether prefill has begun, which references ``pages``."""
    made: int = 0
    """Tokens of all choices."""
    kept_pages: int = 0
    """Always 0: a preempted row keeps nothing in memory."""
    resumed_at: int | None = None
    cache_reported: bool = False

    def __post_init__(self) -> None:
        prompt, seed = self.source.prompt, self.source.seed
        self.choices = [
            FakeChoice(
                number, StopFilter(self.submit.stop), script_of(self.submit, prompt, seed, number)
            )
            for number in range(self.submit.n)
        ]

    @property
    def rid(self) -> str:
        return self.submit.rid

    @property
    def longest(self) -> int:
        """Tokens of the longest running choice."""
        return max((choice.tokens for choice in self.choices), default=0)

    def replay(self) -> list[Report]:
        """Continue choices whose worker died; return reports for those that had ended.

        Needs no steps: tokens are a function of the request.
        """
        reports: list[Report] = []
        for choice, resumed in zip(list(self.choices), self.submit.resume, strict=False):
            for token in resumed.tokens:
                choice.tokens += 1
                self._text(choice, token)
            self.made += choice.tokens
            self.resumed_at = self.longest
            choice.sent_text = SentText(resumed.text_bytes - choice.text_bytes)
            del choice.new_parts[: resumed.parts]
            stopped = choice.stops.stopped or (choice.tokens > 0 and self._at_eos(choice))
            reason: FinishReason | None = "length" if choice.tokens == self.max_new else None
            if reason := resumed.reason or ("stop" if stopped else reason):
                self.choices.remove(choice)
                rest = choice.sent_text.remove_from(choice.stops.finish())
                self.over.stop_text = choice.stops.found
                reports += finish_replayed(
                    self.over, choice.number, resumed, reason, stopped=stopped, rest=rest
                )
        return reports

    def cache_report(self, held: int) -> list[Report]:
        """Return the report of what the prefix cache did, once for a request."""
        reported, self.cache_reported = self.cache_reported, True
        outcome = self.tracked.outcome(held)
        if reported or outcome is None or self.submit.embed is not None or self.submit.resume:
            return []
        return [RowCached(rid=self.rid, outcome=outcome)]

    def prompt_reports(self) -> list[Report]:
        top = self.submit.prompt_logprobs
        logprobs = [] if top is None else self.source.prompt_logprobs(top)
        return [
            RowPrompt(rid=self.rid, index=at, logprobs=logprobs[at : at + _PROMPT_LOGPROBS])
            for at in range(self.submit.prompt_reported, len(logprobs), _PROMPT_LOGPROBS)
        ]

    def decode(self, choice: FakeChoice) -> tuple[list[Report], FinishReason | None]:
        """Generate one token; return its reports, and the reason if it ends the choice."""
        ends = frozenset(self.submit.stop_tokens)
        excluded = ends if choice.tokens < self.submit.min_tokens else frozenset[int]()
        token = self.source.token(choice.number, choice.tokens, excluded)
        choice.tokens += 1
        self.made += 1
        if token in ends and choice.tokens > self.submit.min_tokens:
            return self._reports(choice, [], choice.stops.finish()), "stop"
        text = self._text(choice, token)
        at_eos = self._at_eos(choice)
        over = at_eos or choice.tokens == self.max_new
        reports = self._reports(choice, [token], text + (choice.stops.finish() if over else ""))
        if choice.stops.stopped or at_eos:
            return reports, "stop"
        return reports, "length" if over else None

    def _text(self, choice: FakeChoice, token: int) -> str:
        """Return the text that the newest token adds; stop strings apply to text for the reader."""
        if choice.script is None:
            text = self._filtered(choice, " " + word(token))
        else:
            scripted = choice.script[choice.tokens - 1]
            self.over.reasoning_tokens += scripted.reasoning
            text = "" if scripted.begins is None else self._begin(choice, scripted.begins)
            text += self._filtered(choice, scripted.text)
        choice.text_bytes += len(text.encode())
        return text

    def _begin(self, choice: FakeChoice, part: Begins) -> str:
        """Begin a part; return the text before it that was held back."""
        text = choice.stops.finish()
        choice.stops = StopFilter(self.submit.stop if part.kind == "text" else ())
        call = call_id(self.rid, choice.number, part.call) if part.kind == "call" else ""
        at = choice.text_bytes + len(text.encode())
        choice.new_parts.append(PartStart(at, part.kind, part.name, call))
        return text

    def held_back(self, choice: FakeChoice) -> list[Report]:
        """Return the text that could have been the beginning of a stop string, as a report."""
        return self._reports(choice, [], choice.stops.finish())

    def _filtered(self, choice: FakeChoice, text: str) -> str:
        return choice.stops.push(text) if choice.tokens > self.submit.min_tokens else text

    def _at_eos(self, choice: FakeChoice) -> bool:
        if choice.script is not None:
            return choice.tokens == len(choice.script)
        ends = choice.tokens >= max(self.eos_after, self.submit.min_tokens)
        return bool(self.eos_after) and ends and not self.submit.ignore_eos

    def _reports(self, choice: FakeChoice, tokens: list[int], text: str) -> list[Report]:
        top = self.submit.logprobs
        logprobs = None
        if top is not None:
            logprobs = [self.source.token_logprob(token, choice.tokens, top) for token in tokens]
        text = choice.sent_text.remove_from(text)
        if not (tokens or text):
            return []
        parts, choice.new_parts = choice.new_parts, []
        return [
            RowTokens(
                rid=self.rid,
                index=choice.tokens - 1,
                tokens=tokens,
                text=text,
                choice=choice.number,
                parts=parts,
                logprobs=logprobs,
                level=self.over.level,
            )
        ]


def prompt_of(request: Submit | Tokenize) -> bytes:
    """Return the prompt's tokens, which are its bytes; there is at least one."""
    match request:
        case (
            Submit(prompt=str(prompt), messages=None, tokens=None)
            | Tokenize(prompt=str(prompt), messages=None)
        ):
            found = prompt.encode("utf-8", "replace")
        case (
            Submit(prompt=None, messages=list(messages), tokens=None)
            | Tokenize(prompt=None, messages=list(messages))
        ):
            tools = "".join(f"tool: {tool.name}\n" for tool in request.chat.tools)
            found = (tools + "".join(map(_line, messages))).encode()
            if request.chat.continue_final:
                found = found.removesuffix(b"\n")
        case Submit(prompt=None, messages=None, tokens=list(tokens)):
            if any(not 0 <= token < VOCABULARY for token in tokens):
                raise InvalidRequest(
                    f"a token is outside the vocabulary of {VOCABULARY}", field="tokens"
                )
            found = bytes(tokens)
        case _:
            raise InvalidRequest("give exactly one of prompt, messages and tokens", field="prompt")
    if not found:
        raise EmptyPrompt("the prompt is empty; give at least one token")
    return found


def _line(message: ChatMessage) -> str:
    calls = "".join(f" {call.name} {call.arguments}" for call in message.tool_calls)
    return f"{message.role}: {message.content}{calls}\n"

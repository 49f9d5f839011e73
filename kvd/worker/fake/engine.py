"""An engine without tensors: its speed, load time, sizes and faults come from the model's name.

``fake:tps=200,load=0.1,crash_after=50`` is a model that takes 0.1 s to load, makes 200 steps a
second and ends its process in step 50; `FakeModel` has all the keys. Its tokens are a pure
function of prompt, seed, choice and position; their logprobs are made up, but are those of one
distribution. Bias, penalties and filters change nothing. It asks for grants, queues, prefills and
remembers prompts as the real one does, so that the daemon and everything above it can be tested
without MLX.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kvd.worker.core.replay import check_resume, ended, unsaid
from kvd.worker.engine import ignore_phase
from kvd.worker.fake.pages import FakePages, Pages
from kvd.worker.fake.reclaiming import FakeReclaiming, sizes_of
from kvd.worker.fake.story import VOCABULARY, Story, word
from kvd.worker.prefix.cache import PrefixCache, TrackedPrompt, next_chunks
from kvd.worker.prefix.tree import PrefixTree
from kvd.worker.scheduling.admission import Admission, AdmissionResult, Held
from kvd.worker.scheduling.budget import PageBudget, mebibytes
from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.text.choices import Choices, check_token_ids, deadline_exceeded
from kvd.worker.text.stops import StopFilter
from protocol.errors import (
    ContextTooLong,
    EmptyPrompt,
    ErrorInfo,
    InsufficientMemory,
    InvalidModel,
    InvalidRequest,
    KvdError,
    NumericalError,
    UnknownModel,
    from_info,
)
from protocol.types import (
    KVPart,
    KVSpec,
    MemoryUse,
    ModelInfo,
    Sampling,
    WorkerStats,
)
from protocol.worker import (
    Grant,
    LoadModel,
    MemoryRequested,
    Reclaim,
    Report,
    RowAdmitted,
    RowFailed,
    RowPrompt,
    RowTokens,
    StartLevel,
    Submit,
    Tokenize,
    Tokenized,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.worker.engine import AskGrant, OnPhase, ReportProgress
    from protocol.messages import FinishReason
    from protocol.worker import PreemptionMode

DEFAULT_MAX_TOKENS = 512
CRASH_STATUS = 70
"""EX_SOFTWARE; what the daemon sees of a crash."""

_LOAD_STAGES = 10
_PROMPT_PIECE = 256
"""Tokens of a prompt whose logprobs are told in one report."""


class FakeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can stand behind ``fake:``."""

    tps: float = 1000.0
    """Steps a second, and so tokens of each row; 0 is as fast as it goes."""
    load: float = 0.0
    """Seconds to load."""
    load_error: str = ""
    """Wire code of the error that the load ends with."""
    load_crash: bool = False
    load_hang: bool = False
    crash_after: int = 0
    """Step in which the process ends; 0 is never."""
    crash_on: str = ""
    """Text in a prompt whose first token ends the process."""
    hang_after: int = 0
    """Step that never returns; 0 is never."""
    hang_on: str = ""
    deaf: bool = False
    """What hangs does not heed SIGTERM, as a process in a driver's call does not."""
    nan_after: int = 0
    """Token of each row at which its logits turn bad; 0 is never."""
    nan_on: str = ""
    eos_after: int = 0
    """Token at which each row ends by itself; 0 is never."""
    weights: int = 64 * 1024 * 1024
    """Bytes."""
    page_bytes: int = 64 * 1024
    pages: int = 64
    """Of the first grant."""
    context: int = 16_384


def parse(source: str) -> FakeModel:
    """Read a model's name; other names that the real engine knows are a model without faults."""
    if source in ("demo", "fake") or (source.startswith("/") and Path(source).is_dir()):
        return FakeModel()
    kind, _, settings = source.partition(":")
    if kind != "fake":
        raise UnknownModel(f"the fake engine has no model {source!r}; try fake:tps=100")
    pairs = [setting.partition("=") for setting in settings.split(",") if setting]
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, FakeModel, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(FakeModel.__struct_fields__)
        raise InvalidModel(f"{source}: {error}; the keys are {known}", source=source) from error


@dataclass
class _Choice:
    number: int
    stops: StopFilter
    sent: int = 0
    said_bytes: int = 0
    """Of the text to come, what was sent before the row's last worker died."""

    def unsaid(self, text: str) -> str:
        """Return what of the next text was not sent before."""
        new = unsaid(text, self.said_bytes)
        self.said_bytes = max(0, self.said_bytes - len(text.encode()))
        return new


@dataclass
class _Row:
    submit: Submit
    story: Story
    max_new: int
    ends: frozenset[int]
    choices: list[_Choice]
    """Those that still run."""
    over: Choices
    tracked: TrackedPrompt
    pages: Pages
    """Of its prompt."""
    holds: bool = False
    """Whether it has begun, and so has them."""
    made: int = 0
    kept_pages: int = 0
    """Always none: what is parked here keeps nothing in memory."""
    resumed_at: int | None = None

    @property
    def longest(self) -> int:
        return max((choice.sent for choice in self.choices), default=0)

    @property
    def rid(self) -> str:
        return self.submit.rid

    def token(self, choice: _Choice) -> int:
        """Return the next token: none that would end the completion before ``min_tokens``."""
        early = choice.sent < self.submit.min_tokens
        barred = self.ends if early else frozenset[int]()
        return self.story.token(choice.number, choice.sent, barred)


@dataclass
class FakeEngine:
    """`kvd.worker.engine.Engine` over nothing."""

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _model: FakeModel = field(default_factory=FakeModel)
    _rows: dict[str, _Row] = field(default_factory=dict)
    _reports: list[Report] = field(default_factory=list)
    _steps: int = 0
    _next_step_at: float = 0.0
    _on_phase: OnPhase = ignore_phase
    _most_rows: int = 0
    _prompt_tokens: int = 0
    _computed_tokens: int = 0
    _generated_tokens: int = 0

    # Loading.

    def load(self, command: LoadModel, progress: ReportProgress, ask_grant: AskGrant) -> ModelInfo:
        """Pretend to load, and fail as the name says."""
        model = parse(command.source)
        most = command.max_context or model.context
        self._model = model = msgspec.structs.replace(model, context=min(model.context, most))
        total = model.weights + model.pages * model.page_bytes
        grant = ask_grant(total, "weights and first pages")
        if not grant.granted:
            raise InsufficientMemory(
                f"the model needs {mebibytes(total)}; {mebibytes(grant.available_bytes)} of the"
                f" budget are free{f' ({grant.reason})' if grant.reason else ''}",
                needed_bytes=total,
                available_bytes=grant.available_bytes,
                budget_bytes=grant.budget_bytes,
            )
        for stage in range(_LOAD_STAGES):
            progress("weights", stage / _LOAD_STAGES)
            self.sleep(model.load / _LOAD_STAGES)
        if model.load_crash:
            _crash()
        if model.load_hang:
            self._hang()
        if model.load_error:
            raise from_info(ErrorInfo(model.load_error, "the fake model was asked not to load"))
        progress("ready", 1.0)
        budget = PageBudget(
            model.weights,
            model.page_bytes,
            grant.total_bytes,
            grant.seq,
            budget_bytes=grant.budget_bytes,
        )
        self._scheduler = Scheduler(
            max_rows=command.max_rows,
            chunk=command.prefill_chunk,
            group=True,
            sizes=sizes_of(command.kv),
        )
        self._admission = Admission(self._scheduler, budget, row_pages=0, idle_pages=model.pages)
        self._pages = FakePages(model.page_bytes)
        kv = command.kv
        tree = PrefixTree(self._pages, command.prefill_chunk, kv.prefix_every, kv.prefix_cache)
        self._prefix_cache = PrefixCache(tree)
        where: PreemptionMode = "disk" if command.swap_folder else "recompute"
        self._reclaiming = FakeReclaiming(
            self._admission, self._prefix_cache, self._rows, where, self._report
        )
        return ModelInfo(
            architecture="Fake",
            parameters=0,
            context_length=model.context,
            vocab_size=VOCABULARY,
            layers=1,
            dtype="none",
            kv_scheme=command.kv.name,
            kv_layout="none",
            kv=[_kv_part(command.kv, model.page_bytes // 64)],
            page_bytes=model.page_bytes,
            kv_bytes_per_token=model.page_bytes // 64,
            attention_path="fake",
            attention_error=0.0,
            has_chat_template=True,
            device="none",
        )

    # Requests.

    def submit(self, request: Submit) -> int:
        """Queue a request."""
        prompt = _prompt_of(request)
        room = self._model.context - len(prompt)
        if room < 1 or (request.max_tokens or 1) > room:
            raise ContextTooLong(
                f"prompt and completion take {len(prompt)} + {request.max_tokens or 1} tokens, the"
                f" model's context is {self._model.context}",
                prompt_tokens=len(prompt),
                context_length=self._model.context,
            )
        check_token_ids(request, VOCABULARY)
        max_new = request.max_tokens or min(room, DEFAULT_MAX_TOKENS)
        salt, scored = request.prefix_salt or "", request.prompt_logprobs is not None
        row = _Row(
            request,
            Story(prompt, _seed_of(request.sampling)),
            max_new,
            frozenset(request.stop_tokens),
            [_Choice(number, StopFilter(request.stop)) for number in range(request.n)],
            Choices(request, len(prompt)),
            self._prefix_cache.track(request.rid, prompt, salt, full_prefill=scored),
            self._pages.of(prompt, salt),
        )
        check_resume(request, VOCABULARY)
        news = self._take_up(row)
        if not row.choices:
            self._reports += news
            return len(prompt)
        self._admission.submit(
            request.rid,
            len(prompt),
            max_new,
            priority=request.priority,
            deadline=None if request.deadline_s is None else self.clock() + request.deadline_s,
            choices=len(row.choices),
            path=() if scored else row.tracked.path,
        )
        self._reports += news
        self._rows[request.rid] = row
        self._prefix_cache.enqueue(row.tracked)
        self._prompt_tokens += len(prompt)
        return len(prompt)

    def _take_up(self, row: _Row) -> list[Report]:
        """Bring a row to where it was when its last worker died; needs no steps here."""
        reports: list[Report] = []
        for choice, resumed in zip(list(row.choices), row.submit.resume, strict=False):
            text = ""
            for token in resumed.tokens:
                choice.sent += 1
                said = " " + word(token)
                text += choice.stops.push(said) if choice.sent > row.submit.min_tokens else said
            row.made += choice.sent
            choice.said_bytes = resumed.text_bytes - len(text.encode())
            stopped = choice.stops.stopped or (choice.sent > 0 and self._has_own_end(row, choice))
            found: FinishReason | None = "length" if choice.sent == row.max_new else None
            if reason := resumed.reason or ("stop" if stopped else found):
                row.choices.remove(choice)
                rest = "" if choice.stops.stopped else choice.unsaid(choice.stops.finish())
                reports += ended(
                    row.over, choice.number, resumed, reason, stopped=stopped, rest=rest
                )
        return reports

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Return the bytes of a text: they are its tokens."""
        prompt = list(_prompt_of(request))
        told = prompt[: request.limit]
        texts = [chr(token) for token in told] if request.texts else []
        return Tokenized(seq=request.seq, count=len(prompt), tokens=told, texts=texts)

    def cancel(self, rid: str) -> None:
        """End a row; the next step says so."""
        if (row := self._rows.get(rid)) is not None:
            for choice in row.choices:
                self._reports += row.over.finish(choice.number, "cancelled", choice.sent)
            self._release(row)

    def granted(self, grant: Grant) -> None:
        """Take the answer to a `MemoryRequested`."""
        self._admission.granted(grant)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now."""
        late = self._scheduler.expired(self.clock())
        return bool(self._reports or late or self._admission.has_work)

    @property
    def reads_prompts(self) -> bool:
        """Whether steps read prompts now, and may take long for it."""
        return self._scheduler.prefilling > 0 or self._admission.may_admit

    @property
    def next_deadline(self) -> float | None:
        """When a request's deadline comes."""
        return self._scheduler.next_deadline

    def reclaim(self, command: Reclaim) -> None:
        """Give memory back; the next step says what came of it."""
        self._reclaiming.reclaim(command)

    def start_level(self, command: StartLevel) -> None:
        """Let new rows start at a level."""
        self._admission.set_start_level(command.level)

    # The step.

    def watch(self, on_phase: OnPhase) -> None:
        """Call this before each phase of a step from now on."""
        self._on_phase = on_phase

    def step(self) -> list[Report]:
        """Give each decoding row a token and prefill a chunk, at the model's pace."""
        self._on_phase("decode")
        self._steps += 1
        self._wait_for_turn()
        if self._steps == self._model.crash_after:
            _crash()
        if self._steps == self._model.hang_after:
            self._hang()
        for rid in self._scheduler.expired(self.clock()):
            self._fail(self._rows[rid], deadline_exceeded(self._rows[rid].made))
        result = self._admit()
        if result.evict_pages and self._prefix_cache.evict(
            result.evict_pages * self._model.page_bytes
        ):
            result = self._admit()
        plan = result.plan
        self._tell(result.memory_request)
        self._reports += result.queue_positions
        if result.refused is not None:
            rid, error = result.refused
            self._fail(self._rows[rid], error)
        for rid in plan.resumed:
            self._reclaiming.restore(rid)
        if plan.group:
            self._on_phase("prefill")
            self._prefill()
            self._on_phase("decode")
        self._most_rows = max(self._most_rows, len(plan.decode))
        for rid in plan.decode:
            self._advance(self._rows[rid])
        self._tell(self._admission.give_back_idle(self._held.cached))
        reports, self._reports = self._reports, []
        return reports

    def _admit(self) -> AdmissionResult:
        result = self._admission.admit(self._held)
        begun = [rid for rid in result.plan.admitted if rid not in result.plan.resumed]
        self._reports += [RowAdmitted(rid=rid) for rid in begun]
        return result

    def _wait_for_turn(self) -> None:
        if self._model.tps <= 0:
            return
        now = self.clock()
        if self._next_step_at > now:
            self.sleep(self._next_step_at - now)
        self._next_step_at = max(now, self._next_step_at) + 1.0 / self._model.tps

    def _prefill(self) -> None:
        for chunk in next_chunks(self._scheduler, self._has_new_hit, self._begin):
            row = self._rows[chunk.rid]
            self._computed_tokens += chunk.length
            self._scheduler.mark_prefilled(chunk.rid, chunk.end)
            self._prefix_cache.prefilled(row.tracked, chunk.end, (row.pages, chunk.end), lambda: 0)

    def _has_new_hit(self, rid: str) -> bool:
        return self._prefix_cache.has_new_hit(self._rows[rid].tracked)

    def _begin(self, rid: str) -> int:
        row = self._rows[rid]
        hit = self._prefix_cache.begin_prefill(row.tracked)
        self._pages.hold(row.pages)
        row.holds, row.over.cached_tokens = True, hit.tokens
        return hit.tokens

    @property
    def _held(self) -> Held:
        return Held(cached=self._reclaiming.cached_pages)

    def _tell(self, wish: MemoryRequested | None) -> None:
        if wish is not None:
            self._report(msgspec.structs.replace(wish, reclaimable=self._reclaiming.reclaimable()))

    def _report(self, report: Report) -> None:
        self._reports.append(report)

    def _advance(self, row: _Row) -> None:
        model = self._model
        if _is_in(model.crash_on, row):
            _crash()
        if _is_in(model.hang_on, row):
            self._hang()
        sent = row.choices[0].sent
        if _is_in(model.nan_on, row) or sent + 1 == model.nan_after:
            self._fail(row, NumericalError("the fake model was asked for bad logits"))
            return
        if not row.made:
            self._tell_prompt(row)
        for choice in list(row.choices):
            self._draw(row, choice)

    def _draw(self, row: _Row, choice: _Choice) -> None:
        token = row.token(choice)
        choice.sent += 1
        row.made += 1
        self._generated_tokens += 1
        heeds_stops = choice.sent > row.submit.min_tokens
        if token in row.ends and heeds_stops:
            self._say(row, choice, [], choice.stops.finish())
            self._finish(row, choice, "stop")
            return
        text = " " + word(token)
        if heeds_stops:
            text = choice.stops.push(text)
        own = self._has_own_end(row, choice)
        over = own or choice.sent == row.max_new
        self._say(row, choice, [token], text + (choice.stops.finish() if over else ""))
        if choice.stops.stopped or own:
            self._finish(row, choice, "stop")
        elif over:
            self._finish(row, choice, "length")

    def _has_own_end(self, row: _Row, choice: _Choice) -> bool:
        ends = choice.sent >= max(self._model.eos_after, row.submit.min_tokens)
        return bool(self._model.eos_after) and ends and not row.submit.ignore_eos

    def _tell_prompt(self, row: _Row) -> None:
        top = row.submit.prompt_logprobs
        told = [] if top is None else row.story.told_prompt(top)
        for at in range(row.submit.prompt_reported, len(told), _PROMPT_PIECE):
            piece = told[at : at + _PROMPT_PIECE]
            self._reports.append(RowPrompt(rid=row.rid, index=at, logprobs=piece))

    def _say(self, row: _Row, choice: _Choice, tokens: list[int], text: str) -> None:
        top = row.submit.logprobs
        told = (
            None if top is None else [row.story.told(token, choice.sent, top) for token in tokens]
        )
        text = choice.unsaid(text)
        if tokens or text:
            self._reports.append(
                RowTokens(
                    rid=row.rid,
                    index=choice.sent - 1,
                    tokens=tokens,
                    text=text,
                    choice=choice.number,
                    logprobs=told,
                )
            )

    def _finish(self, row: _Row, choice: _Choice, reason: FinishReason) -> None:
        self._reports += row.over.finish(choice.number, reason, choice.sent)
        row.choices.remove(choice)
        if row.choices:
            self._admission.finish_choice(row.rid)
        else:
            self._release(row)

    def _fail(self, row: _Row, error: KvdError) -> None:
        self._reports.append(RowFailed(rid=row.rid, error=error.info()))
        self._release(row)

    def _release(self, row: _Row) -> None:
        if row.holds:
            self._pages.drop(row.pages)
        self._prefix_cache.remove(row.tracked)
        self._admission.finish(row.rid)
        del self._rows[row.rid]

    def _hang(self) -> NoReturn:
        if self._model.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            self.sleep(3600.0)

    def stats(self) -> WorkerStats:
        """Return the counters."""
        used = self._scheduler.reserved_pages
        return WorkerStats(
            step=self._steps,
            rows_running=self._scheduler.decoding,
            rows_prefilling=self._scheduler.prefilling,
            rows_waiting=self._scheduler.waiting,
            max_rows_in_step=self._most_rows,
            pages_used=used,
            pages_total=self._admission.budget.pages,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            prefix=self._prefix_cache.usage,
            reclaimable=self._reclaiming.reclaimable(),
            generated_tokens=self._generated_tokens,
            memory=MemoryUse(
                weights=self._model.weights,
                kv_pages=self._admission.budget.pages * self._model.page_bytes,
                kv_pages_used=used * self._model.page_bytes,
            ),
        )

    def close(self) -> None:
        """Hold nothing."""


def _kv_part(kv: KVSpec, token_bytes: int) -> KVPart:
    size = kv.max_kv_size
    keep = f" keep {kv.keep}" if kv.keep else ""
    return KVPart(
        kind="full" if size is None else f"window {size}{keep}",
        layers=1,
        path="pages",
        scheme=kv.name,
        batched=True,
        bytes_per_token=token_bytes if size is None else 0,
        bound_bytes=(size or 0) * token_bytes,
    )


def _prompt_of(request: Submit | Tokenize) -> bytes:
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
            found = "".join(f"{one.role}: {one.content}\n" for one in messages).encode()
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


def _seed_of(sampling: Sampling) -> int:
    return 0 if sampling.temperature == 0.0 else 1 + (sampling.seed or 0)


def _is_in(text: str, row: _Row) -> bool:
    return bool(text) and text.encode() in row.story.prompt


def _crash() -> NoReturn:
    os._exit(CRASH_STATUS)

"""New requests: checked, tokenized, their grammars compiled, and handed to the batch.

Threads tokenize long texts while other requests run, and write and compile grammars. The request
waits for that here; other requests are not delayed, and short ones may overtake it. Chat templates,
which are code of the model, run in the main thread: only there their CPU time can be limited.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvd.worker.core.batch import Batch
from kvd.worker.core.embeddings import end_prompt
from kvd.worker.core.replay import check_resume
from kvd.worker.core.request import Completion, Request
from kvd.worker.grammar.answers import has_grammar, write_grammar
from kvd.worker.grammar.choice import GrammarChoice
from kvd.worker.grammar.compiler import Compiler
from kvd.worker.grammar.matcher import Matcher
from kvd.worker.process.memory_limit import limit
from kvd.worker.process.shortage import shortage_of
from kvd.worker.serving.embedding_rules import EmbeddingRules
from kvd.worker.text.choices import Choices, deadline_exceeded
from kvd.worker.text.failures import is_failure
from kvd.worker.text.places import Conversation
from kvd.worker.text.text import Text
from protocol.errors import ContextTooLong, InternalError, KvdError
from protocol.resume import ChoiceProgress
from protocol.worker import ChoiceFinished, Report, RowAccepted, RowFailed, RowNote, Submit

MAX_KEPT_CHARACTERS = 8 * 1024 * 1024
"""Characters of queued requests' messages that are kept for explaining a miss of the prefix cache.
Requests beyond that are explained without the message."""
LONG_CHARACTERS = 4096
"""Characters of a text that a thread tokenizes while other requests run. The embedded model's
tokenizer takes a millisecond for them."""
WAIT_SECONDS = 0.001
"""Seconds that a step waits if no row runs and requests wait here."""

_log = logging.getLogger("kvd.worker")


@dataclass(frozen=True)
class _Prompt:
    """The tokens of a request."""

    tokens: array[int]
    given: int
    """Tokens of the prompt as the client gave it."""
    room: int
    """Tokens of the context that the prompt leaves."""


@dataclass(eq=False)
class _Submission:
    """A request that is not in the batch yet."""

    request: Submit
    deadline: float | None
    encoding: Future[_Prompt] | None = None
    """The work of the thread that tokenizes its text, until its result is read."""
    prompt: _Prompt | None = None
    grammar: GrammarChoice | None = None


class Submissions:
    """The new requests of one engine. ``now``: seconds on the engine's clock, for deadlines."""

    def __init__(
        self, text: Text, batch: Batch, embedding_rules: EmbeddingRules, compiler: Compiler
    ) -> None:
        self._text = text
        self._embedding_rules = embedding_rules
        self._batch = batch
        self._compiler = compiler
        self._writer = ThreadPoolExecutor(1, "grammar writer")
        self._writer.submit(int)  # starts the thread, for which the first grammar would wait
        self._encoder = ThreadPoolExecutor(1, "tokenizer")
        self._waiting: dict[str, _Submission] = {}
        self.prompt_tokens = 0
        """Tokens of the prompts of all requests that were not replayed to their end."""

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its tokens or its grammar."""
        return bool(self._waiting)

    @property
    def tokenizing(self) -> bool:
        """Whether a thread tokenizes the text of a request."""
        return any(one.encoding is not None for one in self._waiting.values())

    def submit(self, request: Submit, now: float) -> int | None:
        """Queue a request, or prepare it first. See `Engine.submit`."""
        check_resume(request, self._text.vocab_size)
        text = self._text.prompt_text(request)
        deadline = None if request.deadline_s is None else now + request.deadline_s
        submission = _Submission(request, deadline)
        busy = self._batch.requests or self._waiting
        # A replayed request had its place before.
        if busy and len(text) >= LONG_CHARACTERS and not request.resume:
            submission.encoding = self._encoder.submit(self._encode_in_thread, request, text)
            self._waiting[request.rid] = submission
            return None
        submission.prompt = prompt = self._encode(request, text)
        submission.grammar = self._choice(request, prompt.tokens)
        if submission.grammar is None:
            self._accept(submission, prompt)
        else:
            self._waiting[request.rid] = submission
        return prompt.given

    def _encode_in_thread(self, request: Submit, text: str) -> _Prompt:
        with limit.never_narrow():
            return self._encode(request, text)

    def _encode(self, request: Submit, text: str) -> _Prompt:
        """Return the tokens of a request that fits into the context. A thread may do so."""
        tokens = array("i", self._text.encode(request, text))
        given = len(tokens)
        if request.embed is not None:
            given = end_prompt(
                tokens, request.embed, self._embedding_rules, self._text.context_length
            )
        room = self._text.context_length - len(tokens)
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextTooLong(
                f"prompt and completion take {len(tokens)} + {request.max_tokens} tokens, the"
                f" model's context is {self._text.context_length}: max_tokens can be {room}",
                prompt_tokens=len(tokens),
                max_tokens=request.max_tokens,
                context_length=self._text.context_length,
            )
        return _Prompt(tokens, given, room)

    def _choice(self, request: Submit, prompt: array[int]) -> GrammarChoice | None:
        """Begin to write a request's grammar; None: any answer."""
        context = self._text.answer_context(request, prompt)
        if not has_grammar(request, context):
            return None
        write = partial(write_grammar, request, context, canonical=self._text.canonical)
        accepted = bool(request.resume)
        return GrammarChoice(self._compiler, self._writer, write, accepted=accepted)

    def work(self, now: float) -> None:
        """Advance the requests whose tokens or grammars are ready."""
        for rid, submission in list(self._waiting.items()):
            try:
                with _failing_alone(rid):
                    is_over = self._advance(submission, now)
            except KvdError as error:
                is_over = True
                self._batch.reports.append(RowFailed(rid=rid, error=error.info()))
            if is_over:
                del self._waiting[rid]

    def _advance(self, submission: _Submission, now: float) -> bool:
        """Advance a request; return whether it was accepted. Raises `KvdError` if it is refused."""
        encoding, grammar = submission.encoding, submission.grammar
        if encoding is not None and encoding.done():
            return self._take_prompt(submission, _result(encoding, submission.request.rid))
        if submission.prompt is not None and (grammar is None or grammar.is_over()):
            self._accept(submission, submission.prompt)
            return True
        if submission.deadline is not None and submission.deadline <= now:
            if encoding is not None:
                encoding.cancel()
            sent = submission.request.resume
            raise deadline_exceeded(sum(len(choice.tokens) for choice in sent))
        return False

    def _take_prompt(self, submission: _Submission, prompt: _Prompt) -> bool:
        """Go on with the tokens of a text; return whether the request was accepted."""
        request, place = submission.request, len(self._batch.reports)
        grammar = self._choice(request, prompt.tokens)
        if grammar is None:
            self._accept(submission, prompt)
        else:
            submission.prompt, submission.grammar, submission.encoding = prompt, grammar, None
        accepted = RowAccepted(rid=request.rid, prompt_tokens=prompt.given)
        self._batch.reports.insert(place, accepted)
        return grammar is None

    def wait(self) -> None:
        """Wait for the oldest request's tokens or grammar, for `WAIT_SECONDS` at most."""
        for submission in self._waiting.values():
            if submission.encoding is not None:
                futures.wait([submission.encoding], WAIT_SECONDS)
            elif submission.grammar is not None:
                submission.grammar.wait(WAIT_SECONDS)
            return

    def cancel(self, rid: str) -> bool:
        """Cancel a request that waits here; return whether it did."""
        submission = self._waiting.pop(rid, None)
        if submission is None:
            return False
        request, prompt = submission.request, submission.prompt
        if submission.encoding is not None:
            submission.encoding.cancel()  # it may run, but nothing waits for it
        choices = Choices(request, 0 if prompt is None else prompt.given)
        reports = list[Report]()
        for choice, sent in enumerate(request.resume or [ChoiceProgress()] * request.n):
            count = len(sent.tokens)
            if sent.reason is None:
                reports += choices.finish(choice, "cancelled", count)
            else:
                reports += choices.finish_reported(choice, sent.reason, count)
        if prompt is None:  # `ChoiceFinished` must not come before `RowAccepted`
            reports = [one for one in reports if not isinstance(one, ChoiceFinished)]
        self._batch.reports += reports
        return True

    def _accept(self, submission: _Submission, given: _Prompt) -> None:
        request, prompt = submission.request, given.tokens
        matchers: list[Matcher | None] = [None] * request.n
        valid = False
        if (choice := submission.grammar) is not None:
            matchers = choice.matchers(request.n)
            valid = choice.grammar is not None and choice.grammar.has_valid_calls
            notes = (RowNote(rid=request.rid, reason=note) for note in choice.notes)
            self._batch.reports.extend(notes)
        completions = [
            Completion(
                (request.rid, index),
                self._text.stream(
                    request,
                    prompt,
                    index,
                    has_valid_calls=valid,
                ),
                prompt[-1],
                matcher=matcher,
            )
            for index, matcher in enumerate(matchers)
        ]
        tracked = self._batch.prefix_cache.track(
            request.rid,
            prompt,
            request.prefix_salt or "",
            full_prefill=request.prompt_logprobs is not None or request.embed is not None,
        )
        accepted = Request(
            submit=request,
            prompt=prompt,
            max_new=request.max_tokens or given.room,
            completions=completions,
            choices=Choices(request, given.given),
            tracked=tracked,
            conversation=self._conversation(request),
            prompt_reported=request.prompt_reported,
        )
        if self._batch.add(accepted, submission.deadline):
            self.prompt_tokens += given.given

    def _conversation(self, request: Submit) -> Conversation | None:
        """Return what a prompt was rendered from, unless queued requests keep too much of that."""
        if request.messages is None:
            return None
        conversation = Conversation(request.messages, request.chat)
        waiting = (one.conversation for one in self._batch.requests.values())
        kept = sum(one.characters for one in waiting if one is not None)
        return conversation if kept + conversation.characters <= MAX_KEPT_CHARACTERS else None


@contextmanager
def _failing_alone(rid: str) -> Iterator[None]:
    """Turn what a tokenizer or a model's code raises into an error of this request alone."""
    try:
        yield
    except KvdError:
        raise
    except BaseException as error:
        if not is_failure(error) or shortage_of(error) is not None:
            raise  # if memory is short, the engine repeats the step
        raise _internal(rid, error) from error


def _result(encoding: Future[_Prompt], rid: str) -> _Prompt:
    """Return what a thread has computed; raises `KvdError`. A step cannot repeat the thread."""
    try:
        return encoding.result()
    except KvdError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise _internal(rid, error) from error


def _internal(rid: str, error: BaseException) -> InternalError:
    _log.error("request %s failed before it was queued", rid, exc_info=error)
    return InternalError("the worker failed to accept the request; see its log")

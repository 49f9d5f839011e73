"""New requests: checked, tokenized, their grammars compiled, and handed to the batch.

A grammar is written and compiled in threads. The request waits for it here; other requests are not
delayed.
"""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
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
from kvd.worker.serving.embedding_rules import EmbeddingRules
from kvd.worker.text.choices import Choices, deadline_exceeded
from kvd.worker.text.places import Conversation
from kvd.worker.text.text import Text
from protocol.errors import ContextTooLong, KvdError
from protocol.resume import ChoiceProgress
from protocol.worker import RowFailed, RowNote, Submit

MAX_KEPT_CHARACTERS = 8 * 1024 * 1024
"""Characters of queued requests' messages that are kept for explaining a miss of the prefix cache.
Requests beyond that are explained without the message."""
WAIT_SECONDS = 0.001
"""Seconds that a step waits if no row runs and a grammar is being compiled."""


@dataclass(frozen=True, eq=False)
class _Submission:
    """A checked request."""

    request: Submit
    prompt: array[int]
    prompt_tokens: int
    """Tokens of the prompt as the client gave it."""
    room: int
    """Tokens of the context that the prompt leaves."""
    deadline: float | None
    grammar: GrammarChoice | None


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
        self._waiting: dict[str, _Submission] = {}
        self.prompt_tokens = 0
        """Tokens of the prompts of all requests that were not replayed to their end."""

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def submit(self, request: Submit, now: float) -> int:
        """Queue a request, or compile its grammar first; return its prompt's tokens."""
        check_resume(request, self._text.vocab_size)
        prompt = array("i", self._text.encode(request))
        prompt_tokens = len(prompt)
        if request.embed is not None:
            prompt_tokens = end_prompt(
                prompt, request.embed, self._embedding_rules, self._text.context_length
            )
        room = self._text.context_length - len(prompt)
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextTooLong(
                f"prompt and completion take {len(prompt)} + {request.max_tokens} tokens, the"
                f" model's context is {self._text.context_length}: max_tokens can be {room}",
                prompt_tokens=len(prompt),
                max_tokens=request.max_tokens,
                context_length=self._text.context_length,
            )
        deadline = None if request.deadline_s is None else now + request.deadline_s
        choice = self._choice(request, prompt)
        submission = _Submission(request, prompt, prompt_tokens, room, deadline, choice)
        if choice is None:
            self._accept(submission)
        else:
            self._waiting[request.rid] = submission
        return prompt_tokens

    def _choice(self, request: Submit, prompt: array[int]) -> GrammarChoice | None:
        """Begin to write a request's grammar; None: any answer."""
        context = self._text.answer_context(request, prompt)
        if not has_grammar(request, context):
            return None
        write = partial(write_grammar, request, context, canonical=self._text.canonical)
        accepted = bool(request.resume)
        return GrammarChoice(self._compiler, self._writer, write, accepted=accepted)

    def work(self, now: float) -> None:
        """Accept the requests whose grammars are compiled."""
        for rid, submission in list(self._waiting.items()):
            grammar = submission.grammar
            assert grammar is not None
            error: KvdError | None = None
            if grammar.is_over():
                try:
                    self._accept(submission)
                except KvdError as refused:
                    error = refused
            elif submission.deadline is not None and submission.deadline <= now:
                sent = submission.request.resume
                error = deadline_exceeded(sum(len(choice.tokens) for choice in sent))
            else:
                continue
            del self._waiting[rid]
            if error is not None:
                self._batch.reports.append(RowFailed(rid=rid, error=error.info()))

    def wait(self) -> None:
        """Wait for the oldest compilation, for `WAIT_SECONDS` at most."""
        for submission in self._waiting.values():
            assert submission.grammar is not None
            submission.grammar.wait(WAIT_SECONDS)
            return

    def cancel(self, rid: str) -> bool:
        """Cancel a request that waits for its grammar; return whether it did."""
        submission = self._waiting.pop(rid, None)
        if submission is None:
            return False
        request = submission.request
        choices = Choices(request, submission.prompt_tokens)
        for choice, sent in enumerate(request.resume or [ChoiceProgress()] * request.n):
            count = len(sent.tokens)
            if sent.reason is None:
                self._batch.reports += choices.finish(choice, "cancelled", count)
            else:
                self._batch.reports += choices.finish_reported(choice, sent.reason, count)
        return True

    def _accept(self, submission: _Submission) -> None:
        request, prompt = submission.request, submission.prompt
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
            max_new=request.max_tokens or submission.room,
            completions=completions,
            choices=Choices(request, submission.prompt_tokens),
            tracked=tracked,
            conversation=self._conversation(request),
            prompt_reported=request.prompt_reported,
        )
        if self._batch.add(accepted, submission.deadline):
            self.prompt_tokens += submission.prompt_tokens

    def _conversation(self, request: Submit) -> Conversation | None:
        """Return what a prompt was rendered from, unless queued requests keep too much of that."""
        if request.messages is None:
            return None
        conversation = Conversation(request.messages, request.chat)
        waiting = (one.conversation for one in self._batch.requests.values())
        kept = sum(one.characters for one in waiting if one is not None)
        return conversation if kept + conversation.characters <= MAX_KEPT_CHARACTERS else None

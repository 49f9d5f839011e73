"""The model registry's state, and comparisons of the models in it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from actors import mail
from actors.runtime.actor import DeferredReply, Ref
from actors.status import KnownModel, StatusTable
from protocol import worker as wire
from protocol.errors import InvalidRequest, KvdError, ModelExists
from protocol.fields import ALIAS_PATTERN, ALIAS_RULE
from protocol.kv import KVSpec
from protocol.model_source import is_source, unknown_source
from protocol.policy import ModelPolicy
from protocol.types import ModelState, ModelStatus

AT_LOAD = ("max_context", "ranks", "device")
"""Fields of `ModelPolicy` that apply only when the model is loaded."""


@dataclass
class RegistryEntry:
    """A model with a worker."""

    name: str
    known: KnownModel
    worker: Ref[mail.WorkerMail]
    state: ModelState = "spawning"
    served: bool = False
    """Whether the model was ready at least once."""
    leaving: bool = False
    """Whether an unload, an eviction or the shutdown has begun."""
    evicted: bool = False
    """Whether the governor evicts the model: it stays known, and a request loads it again."""
    load_replies: list[tuple[DeferredReply[ModelStatus], mail.Watcher | None]] = field(
        default_factory=list
    )
    unload_replies: list[DeferredReply[int]] = field(default_factory=list)
    before: KnownModel | None = None
    """How the model was known before a client's load; restored if that load is refused, and at the
    unload."""
    requested: bool = False
    """Whether a request or a text caused the load; the model stays known if the load fails."""
    texts: list[tuple[DeferredReply[wire.Tokenized], mail.TokenizeText]] = field(
        default_factory=list
    )
    """Texts to be tokenized when the model is ready; after an eviction they load it again."""
    reloads: list[tuple[DeferredReply[ModelStatus], mail.LoadModel]] = field(default_factory=list)
    """Loads that arrived during the eviction; they start after it."""
    keep_alive_s: float | None = None
    """Idle limit that the newest request with ``keep_alive`` has set; negative: none."""

    @property
    def policy(self) -> ModelPolicy:
        """The policy in force: a request's ``keep_alive`` replaces the idle limit."""
        policy, limit = self.known.policy, self.keep_alive_s
        if limit is None:
            return policy
        return replace(policy, idle_ttl_s=limit if limit >= 0 else None)

    def fail_replies(self, error: KvdError) -> None:
        self.fail_loads(error)
        self.fail_texts(error)

    def fail_loads(self, error: KvdError) -> None:
        loads, self.load_replies = self.load_replies, []
        for reply, _ in loads:
            reply.fail(error)

    def fail_texts(self, error: KvdError) -> None:
        texts, self.texts = self.texts, []
        for reply, _ in texts:
            reply.fail(error)


@dataclass
class RegistryState:
    """The registry's state, which survives a restart of its actor."""

    statuses: StatusTable
    start_worker: Callable[[str, KnownModel], Ref[mail.WorkerMail]]
    stop_worker: Callable[[Ref[mail.WorkerMail]], None]
    router: Ref[mail.RouterMail]
    governor: Ref[mail.GovernorMail]
    on_empty: Callable[[], None]
    """Called once, when a shutdown has stopped every worker."""
    entries: dict[str, RegistryEntry] = field(default_factory=dict)
    draining: bool = False
    closing: bool = False
    closed: bool = False
    shutdown_watchers: list[mail.Watcher] = field(default_factory=list)

    def set_found(self, sources: Mapping[str, str]) -> None:
        """Set the models of the models folder; models that are known otherwise stay as they are."""
        known = self.statuses.known
        for name in [name for name, it in known.items() if it.found and not it.listed]:
            if sources.get(name) != known[name].source and name not in self.entries:
                del known[name]
        for name, source in sources.items():
            known.setdefault(name, KnownModel(source, found=True))

    def named(self, load: mail.LoadModel) -> mail.LoadModel:
        """Return a load whose source is a known model's name as a load of that model's source.

        Raises a `ModelError` if it is neither, or the name of a folder that cannot be loaded.
        """
        if is_source(load.source):
            return load
        if (known := self.statuses.lookup(load.source)) is not None:
            kv = load.kv or known.kv
            return replace(load, source=known.source, alias=load.alias or load.source, kv=kv)
        self.statuses.find_model(load.source)  # raises the reason
        if not self.statuses.may_load(load.source):
            raise unknown_source(load.source)
        return load

    def wanted(self, name: str, load: mail.LoadModel) -> KnownModel:
        """Return the model that a load requests. Absent fields have the values of the known model.

        If the known model has another source, fields in `AT_LOAD` have their defaults. Raises
        `UnsupportedModel` if this machine lacks the requested devices.
        """
        known = self.statuses.known.get(name) or KnownModel(load.source)
        kv, policy, found = known.kv, known.policy, known.found
        if known.source != load.source:
            kv, found = KVSpec(), False
            policy = replace(policy, **{field: getattr(ModelPolicy(), field) for field in AT_LOAD})
        policy = load.policy.applied_to(policy)
        if (error := self.statuses.missing_device(name, policy)) is not None:
            raise error
        return dataclasses.replace(
            known,
            source=load.source,
            kv=load.kv or kv,
            policy=policy,
            found=found,
        )

    def check(self) -> None:
        for name, entry in self.entries.items():
            assert entry.name == name, "an entry under another name"
            assert entry.leaving or not (entry.evicted or entry.reloads), "evicted but not leaving"
            assert entry.leaving or not entry.unload_replies, "an unload without an order"
        assert not self.closing or self.draining, "shuts down and accepts new work"


def is_loaded_as(known: KnownModel, other: KnownModel) -> bool:
    return (known.source, known.kv) == (other.source, other.kv) and not _differences(known, other)


def _differences(known: KnownModel, other: KnownModel) -> list[str]:
    """Return the fields of `AT_LOAD` that differ."""
    one, two = known.policy, other.policy
    return [field for field in AT_LOAD if getattr(one, field) != getattr(two, field)]


def model_exists(name: str, known: KnownModel, wanted: KnownModel) -> ModelExists:
    other = ""
    if known.source == wanted.source and known.kv.name == wanted.kv.name:
        differing = _differences(known, wanted) if known.kv == wanted.kv else ["KV settings"]
        other = f" but different {' and '.join(differing)}"
    return ModelExists(
        f"{name} is loaded from {known.source} with {known.kv.name}{other}; "
        "unload it first, or load under another alias",
        model=name,
    )


def check_name(name: str, load: mail.LoadModel) -> None:
    if re.search(ALIAS_PATTERN, name):
        return
    if load.alias is not None:
        raise InvalidRequest(f"alias {ALIAS_RULE}", field="alias")
    raise InvalidRequest(
        f"{name!r} cannot be a model's name: it {ALIAS_RULE}; load it under an alias", field="alias"
    )

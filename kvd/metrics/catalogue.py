"""Every metric that there is: its name, its labels, what it says, and when to look at it.

The exposition takes ``HELP`` and ``TYPE`` from here, and docs/metrics.md is made of it
(`kvd.metrics.reference`). Units are base units. Labels hold models that the daemon knows, and words
of fixed lists: never what a request says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.metrics import bounds
from protocol.histogram import SPAN_BOUNDS_S


@dataclass(frozen=True, eq=False)
class Metric:
    """One family of series; each is a key, and known by itself."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    look: str
    """When to look at it."""
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets."""


MODEL = ("model",)

# -- memory ------------------------------------------------------------------------------------

BUDGET = Metric(
    "kvd_budget_bytes", "gauge",
    "Memory for all models together",
    "the line that everything else stays below",
)  # fmt: skip
GRANTED = Metric(
    "kvd_granted_bytes", "gauge",
    "Memory that workers may hold, all grants together",
    "near the budget: the next load or long request makes somebody give back",
)  # fmt: skip
VIOLATIONS = Metric(
    "kvd_budget_violations_total", "counter",
    "Times that the grants were seen to exceed the budget",
    "anything but 0 is a bug of kvd's: report it with the log",
)  # fmt: skip
MODEL_GRANTED = Metric(
    "kvd_model_granted_bytes", "gauge",
    "Memory that a model's worker may hold",
    "who has the budget",
    MODEL,
)  # fmt: skip
MODEL_FOOTPRINT = Metric(
    "kvd_model_footprint_bytes", "gauge",
    "Memory that a model's process takes, as the system counts it",
    "above what was granted: it counts against the budget, see the event excess",
    MODEL,
)  # fmt: skip
MODEL_MEMORY = Metric(
    "kvd_model_memory_bytes", "gauge",
    "What a worker holds or has reserved, by kind; the kinds do not overlap",
    "what a model's memory is spent on",
    ("model", "kind"),
)  # fmt: skip
KV_LEVEL = Metric(
    "kvd_kv_level_bytes", "gauge",
    "KV pages in use, by the scheme of their level",
    "pages below the top: requests were stepped down to make room",
    ("model", "level"),
)  # fmt: skip
KV_PAGES = Metric(
    "kvd_kv_pages", "gauge",
    "KV pages of 64 tokens that are used and free",
    "how full a model's cache is",
    ("model", "state"),
)  # fmt: skip
START_LEVEL = Metric(
    "kvd_kv_start_level", "gauge",
    "Level of the KV ladder that new requests of a model start on; 0 is the top",
    "above 0 for long: the budget is too small for what runs",
    MODEL,
)  # fmt: skip
RECLAIMABLE = Metric(
    "kvd_reclaimable_bytes", "gauge",
    "What a worker could give back, by means; each on top of those before it",
    "how far memory is from running short: spare is free, park interrupts requests",
    ("model", "means"),
)  # fmt: skip
ALLOCATOR_ACTIVE = Metric(
    "kvd_allocator_active_bytes", "gauge",
    "What MLX's allocator counts as in use",
    "against the sum of the kinds: what a step takes for a moment",
    MODEL,
)  # fmt: skip
ALLOCATOR_PEAK = Metric(
    "kvd_allocator_peak_bytes", "gauge",
    "The most that MLX's allocator has counted since the load",
    "whether the reserved scratch is enough",
    MODEL,
)  # fmt: skip
HOST_MEMORY = Metric(
    "kvd_host_memory_bytes", "gauge",
    "What the machine or the cgroup has",
    "whether the budget leaves room for the rest of the machine",
)  # fmt: skip
HOST_AVAILABLE = Metric(
    "kvd_host_memory_available_bytes", "gauge",
    "What the machine or the cgroup has left",
    "low while kvd is inside its budget: somebody else takes it",
)  # fmt: skip
ACCELERATOR_LIMIT = Metric(
    "kvd_accelerator_limit_bytes", "gauge",
    "What the accelerator may use at most; absent where there is none",
    "when you choose a budget",
)  # fmt: skip
HOST_PRESSURE = Metric(
    "kvd_host_memory_pressure", "gauge",
    "1 for the memory pressure that the system reports, 0 for the other words",
    "the machine swaps: lower the budget, or end what else takes memory",
    ("pressure",),
)  # fmt: skip
ACTIONS = Metric(
    "kvd_governor_actions_total", "counter",
    "What was done to make room, and why not (docs/protocol.md lists the kinds of events)",
    "steps down and parking: the budget is short; kvctl events has each with its reason",
    ("model", "kind"),
)  # fmt: skip

# -- requests ----------------------------------------------------------------------------------

REQUESTS = Metric(
    "kvd_requests", "gauge",
    "Requests that the daemon holds, by what they do: waiting, running or parked",
    "waiting grows: too little memory or too few places",
    ("model", "state"),
)  # fmt: skip
RECEIVED = Metric(
    "kvd_requests_received_total", "counter",
    "Requests that came, also those for models that do not exist (model is empty then)",
    "the load",
    MODEL,
)  # fmt: skip
FINISHED = Metric(
    "kvd_requests_finished_total", "counter",
    "Requests that ended well, by reason: stop, length or cancelled",
    "many cancelled: clients lose patience",
    ("model", "reason"),
)  # fmt: skip
FAILED = Metric(
    "kvd_requests_failed_total", "counter",
    "Requests that ended with an error, by its code (docs/protocol.md)",
    "overloaded: more work than fits; quarantined, worker_died, internal: look into the log",
    ("model", "code"),
)  # fmt: skip
PAUSED = Metric(
    "kvd_requests_paused_total", "counter",
    "Times that a request was parked: memory for others, or a restart of its worker",
    "rising by memory: latency is paid for lack of room",
    ("model", "reason"),
)  # fmt: skip
RESUMED = Metric(
    "kvd_requests_resumed_total", "counter",
    "Times that a parked request went on",
    "it follows the parked ones; if not, see kvd_requests",
    MODEL,
)  # fmt: skip
QUEUE_TIME = Metric(
    "kvd_request_queue_time_seconds", "histogram",
    "From a request's arrival until it has memory and a place: loads of its model are in it",
    "the time to the first token is long: is it waiting, or reading the prompt?",
    MODEL, bounds.QUEUE_S,
)  # fmt: skip
FIRST_TOKEN = Metric(
    "kvd_time_to_first_token_seconds", "histogram",
    "From a request's arrival until its first token goes to the client",
    "what people feel first",
    MODEL, bounds.FIRST_TOKEN_S,
)  # fmt: skip
TOKEN_GAP = Metric(
    "kvd_inter_token_latency_seconds", "histogram",
    "Between one token of a completion and the next, time parked and restarts in it",
    "how fluently text comes; its tail shows long prompts of others and parking",
    MODEL, bounds.TOKEN_S,
)  # fmt: skip
WHOLE_TIME = Metric(
    "kvd_e2e_request_latency_seconds", "histogram",
    "From a request's arrival to its end, of those that ended well",
    "for time limits of clients",
    MODEL, bounds.REQUEST_S,
)  # fmt: skip

# -- tokens ------------------------------------------------------------------------------------

PROMPT_TOKENS = Metric(
    "kvd_prompt_tokens_total", "counter",
    "Tokens of the prompts that were accepted",
    "the load, in tokens",
    MODEL,
)  # fmt: skip
COMPUTED_TOKENS = Metric(
    "kvd_prompt_tokens_computed_total", "counter",
    "Prompt tokens that were read: not those found in the cache, and again those read twice",
    "above the prompts' own: restarts, or parked requests that are computed again",
    MODEL,
)  # fmt: skip
GENERATED = Metric(
    "kvd_generation_tokens_total", "counter",
    "Tokens that went to clients",
    "throughput",
    MODEL,
)  # fmt: skip
PREFIX_LOOKUPS = Metric(
    "kvd_prefix_cache_lookups_total", "counter",
    "Prompts that were looked up in the cache",
    "beside the tokens below",
    MODEL,
)  # fmt: skip
PREFIX_QUERIES = Metric(
    "kvd_prefix_cache_query_tokens_total", "counter",
    "Tokens of the prompts that were looked up",
    "the denominator of the hit ratio",
    MODEL,
)  # fmt: skip
PREFIX_HITS = Metric(
    "kvd_prefix_cache_hit_tokens_total", "counter",
    "Of these, those that were found and not read again",
    "low although prompts begin alike: raise prefix_cache, or is memory always short?",
    MODEL,
)  # fmt: skip
PREFIX_EVICTED = Metric(
    "kvd_prefix_cache_evictions_total", "counter",
    "Checkpoints of prompts that were dropped to make room",
    "many: the cache is too small for the working set",
    MODEL,
)  # fmt: skip
PREFIX_CHECKPOINTS = Metric(
    "kvd_prefix_cache_checkpoints", "gauge",
    "Places that later prompts can go on from",
    "0 for long: nothing is remembered",
    MODEL,
)  # fmt: skip
PREFIX_BYTES = Metric(
    "kvd_prefix_cache_bytes", "gauge",
    "What remembered prompts hold; a part of the pages and tails",
    "against the setting prefix_cache",
    MODEL,
)  # fmt: skip

# -- workers -----------------------------------------------------------------------------------

STATE = Metric(
    "kvd_model_state", "gauge",
    "1 for the state that a model is in, 0 for the others",
    "backoff or failed: its worker dies; asleep models are not here",
    ("model", "state"),
)  # fmt: skip
UNLOADED = Metric(
    "kvd_models_unloaded", "gauge",
    "Models that are known and not loaded: a request brings them",
    "beside the loads: do models take turns in a budget that is too small?",
)  # fmt: skip
INFO = Metric(
    "kvd_model_info", "gauge",
    "1, with what a loaded model is",
    "to join facts to other series",
    ("model", "architecture", "dtype", "kv_scheme", "device"),
)  # fmt: skip
ATTENTION = Metric(
    "kvd_attention_path_info", "gauge",
    "1, with the path that decode attention takes, as the check at the load chose it",
    "slower than expected: reference means that kernels were wrong, slow or absent",
    ("model", "path"),
)  # fmt: skip
ATTENTION_CALL = Metric(
    "kvd_attention_call_seconds", "gauge",
    "What decode attention took a layer when the load timed it, by path: fused or reference; "
    "absent where it timed none, as on CPUs",
    "fused not below reference: kernels are left out; or did something else keep the device busy?",
    ("model", "path"),
)  # fmt: skip
LOADS = Metric(
    "kvd_model_loads_total", "counter",
    "Times that a model became ready",
    "rising without restarts: models push each other out of the budget",
    MODEL,
)  # fmt: skip
RESTARTS = Metric(
    "kvd_worker_restarts_total", "counter",
    "Times that a worker is started again after its process was lost, by reason",
    "any that is not killed: the log has the story; killed was somebody else",
    ("model", "reason"),
)  # fmt: skip
STEPS = Metric(
    "kvd_worker_steps_total", "counter",
    "Steps of a worker's loop",
    "tokens against steps: how many requests share one",
    MODEL,
)  # fmt: skip
PHASES = Metric(
    "kvd_step_phase_seconds", "histogram",
    "How long a worker was in a phase of its step: tokenize, prefill, decode, flush or pools",
    "what makes tokens late: prompts of others (prefill), making room (pools), or decoding",
    ("model", "phase"), SPAN_BOUNDS_S,
)  # fmt: skip
FLUSHES = Metric(
    "kvd_kv_flushes_total", "counter",
    "Times that full pages were written into the pools",
    "beside its time in kvd_step_phase_seconds",
    MODEL,
)  # fmt: skip
LAUNCHES = Metric(
    "kvd_attention_kernel_launches_total", "counter",
    "Attention kernels of kvd's own that decode steps have launched",
    "0 on an accelerator: see kvd_attention_path_info",
    MODEL,
)  # fmt: skip

# -- the daemon --------------------------------------------------------------------------------

BUILD = Metric(
    "kvd_build_info", "gauge",
    "1, with the versions",
    "what runs where",
    ("version", "python"),
)  # fmt: skip
DRAINING = Metric(
    "kvd_draining", "gauge",
    "1 while the daemon takes no new work",
    "requests are refused with the code draining",
)  # fmt: skip
LAG = Metric(
    "kvd_event_loop_lag_seconds", "histogram",
    "How late the daemon's event loop was for a timer; ten times a second while it has requests",
    "its tail above 50 ms: the daemon itself is short of CPU, and all streams are late",
    (), bounds.LAG_S,
)  # fmt: skip
HTTP = Metric(
    "kvd_http_responses_total", "counter",
    "Answers of HTTP by path and status; what is no path of the API has none",
    "401 and 403: who asks without being allowed to; 429 and 503: who is sent away",
    ("path", "code"),
)  # fmt: skip
FOOTPRINT = Metric(
    "kvd_process_footprint_bytes", "gauge",
    "Memory that the daemon's own process takes, without its workers",
    "steady growth is a bug",
)  # fmt: skip
CPU = Metric(
    "kvd_process_cpu_seconds_total", "counter",
    "CPU time of the daemon's own process",
    "near one second a second: the daemon is the bottleneck",
)  # fmt: skip
FILES = Metric(
    "kvd_process_open_fds", "gauge",
    "Files and sockets that the daemon has open",
    "with kvd_process_max_fds: connections that nobody closes",
)  # fmt: skip
MOST_FILES = Metric(
    "kvd_process_max_fds", "gauge",
    "Files and sockets that the daemon may have open; absent: any number",
    "when connections are refused",
)  # fmt: skip
STARTED = Metric(
    "kvd_process_start_time_seconds", "gauge",
    "When the daemon was started, in seconds since 1970",
    "restarts of the daemon itself",
)  # fmt: skip

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Memory": (
        BUDGET, GRANTED, VIOLATIONS, MODEL_GRANTED, MODEL_FOOTPRINT, MODEL_MEMORY, KV_LEVEL,
        KV_PAGES, START_LEVEL, RECLAIMABLE, ALLOCATOR_ACTIVE, ALLOCATOR_PEAK, HOST_MEMORY,
        HOST_AVAILABLE, ACCELERATOR_LIMIT, HOST_PRESSURE, ACTIONS,
    ),
    "Requests": (
        REQUESTS, RECEIVED, FINISHED, FAILED, PAUSED, RESUMED, QUEUE_TIME, FIRST_TOKEN, TOKEN_GAP,
        WHOLE_TIME,
    ),
    "Tokens and prompts": (
        PROMPT_TOKENS, COMPUTED_TOKENS, GENERATED, PREFIX_LOOKUPS, PREFIX_QUERIES, PREFIX_HITS,
        PREFIX_EVICTED, PREFIX_CHECKPOINTS, PREFIX_BYTES,
    ),
    "Models and workers": (
        STATE, UNLOADED, INFO, ATTENTION, ATTENTION_CALL, LOADS, RESTARTS, STEPS, PHASES, FLUSHES,
        LAUNCHES,
    ),
    "The daemon": (
        BUILD, DRAINING, LAG, HTTP, FOOTPRINT, CPU, FILES, MOST_FILES, STARTED,
    ),
}  # fmt: skip
"""All of them, in the order of exposition and page."""


def everything() -> list[Metric]:
    """Return all metrics."""
    return [metric for metrics in GROUPS.values() for metric in metrics]

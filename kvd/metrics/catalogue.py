"""All metrics: names, labels, descriptions and advice, also for docs/metrics.md.

Units are base units. Labels contain only known models and fixed values, never text of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.metrics import bounds
from protocol.types import SPAN_BOUNDS_S


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric family, compared by identity."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    advice: str
    """How to interpret and use it."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


MODEL = ("model",)

BUDGET = Metric(
    "kvd_budget_bytes", "gauge", (),
    "Memory budget for all models together, on all GPUs",
    "The limit for the sum of all grants",
)  # fmt: skip
GRANTED = Metric(
    "kvd_granted_bytes", "gauge", (),
    "Sum of all grants: memory that workers may hold",
    "Near the budget, the next load or long request makes the governor reclaim memory",
)  # fmt: skip
DEVICE_BUDGET = Metric(
    "kvd_device_budget_bytes", "gauge", ("device",),
    "Memory budget of a GPU; absent with fewer than two GPUs",
    "The limit for the sum of grants on that GPU",
)  # fmt: skip
DEVICE_GRANTED = Metric(
    "kvd_device_granted_bytes", "gauge", ("device",),
    "Memory of a GPU that workers may hold; absent with fewer than two GPUs",
    "If one GPU is full and another is not, load a model with another `device`",
)  # fmt: skip
HOST_BUDGET = Metric(
    "kvd_host_budget_bytes", "gauge", (),
    "Memory budget of the host; absent unless GPUs have memory of their own",
    "The limit for the sum of what workers' processes are charged in the host's memory",
)  # fmt: skip
HOST_GRANTED = Metric(
    "kvd_host_granted_bytes", "gauge", (),
    "Host memory charged for workers' processes; absent unless GPUs have memory of their own",
    "If it is near the budget, the next load unloads an idle model or waits",
)  # fmt: skip
VIOLATIONS = Metric(
    "kvd_budget_violations_total", "counter", (),
    "Times that an invariant of the budget was violated, such as a sum of grants above it",
    "Any value but 0 is a bug: report it with the log",
)  # fmt: skip
MODEL_GRANTED = Metric(
    "kvd_model_granted_bytes", "gauge", MODEL,
    "Memory that a model's worker may hold",
    "Shows which models use the budget",
)  # fmt: skip
MODEL_FOOTPRINT = Metric(
    "kvd_model_footprint_bytes", "gauge", MODEL,
    "Footprint of a model's processes as the system counts it",
    "Memory above the grant counts against the budget; see the event excess",
)  # fmt: skip
RANK_FOOTPRINT = Metric(
    "kvd_rank_footprint_bytes", "gauge", ("model", "rank"),
    "Footprint of each process of a model that several processes share",
    "Ranks of one model hold about the same; the leader, rank 0, also holds requests and grammars",
)  # fmt: skip
MODEL_MEMORY = Metric(
    "kvd_model_memory_bytes", "gauge", ("model", "kind"),
    "Memory that a worker holds or has reserved, by kind; the kinds do not overlap",
    "Shows what a model's memory is used for",
)  # fmt: skip
KV_LEVEL = Metric(
    "kvd_kv_level_bytes", "gauge", ("model", "level"),
    "KV pages in use, by the KV scheme of their precision level",
    "Pages below the highest level belong to requests that were stepped down to free memory",
)  # fmt: skip
KV_PAGES = Metric(
    "kvd_kv_pages", "gauge", ("model", "state"),
    "KV pages of 64 tokens, used and free",
    "Shows how full a model's cache is",
)  # fmt: skip
START_LEVEL = Metric(
    "kvd_kv_start_level", "gauge", MODEL,
    "Precision level of a model's new requests; 0 is the highest precision",
    "If it stays above 0, the budget is too small for the load",
)  # fmt: skip
RECLAIMABLE = Metric(
    "kvd_reclaimable_bytes", "gauge", ("model", "method"),
    "Memory that a worker could give back, by reclaim method; each excludes the methods "
    "before it",
    "Shows how close memory is to running short: spare costs nothing, preempt interrupts "
    "requests",
)  # fmt: skip
ALLOCATOR_ACTIVE = Metric(
    "kvd_allocator_active_bytes", "gauge", MODEL,
    "Memory in use according to MLX's allocator",
    "The difference to the sum of the kinds is temporary memory of a step",
)  # fmt: skip
ALLOCATOR_PEAK = Metric(
    "kvd_allocator_peak_bytes", "gauge", MODEL,
    "Peak memory in use according to MLX's allocator since the load",
    "Shows whether the reserved scratch memory is enough",
)  # fmt: skip
HOST_MEMORY = Metric(
    "kvd_host_memory_bytes", "gauge", (),
    "Memory of the machine or the cgroup",
    "Compare it with the budget to see what is left for other programs",
)  # fmt: skip
HOST_AVAILABLE = Metric(
    "kvd_host_memory_available_bytes", "gauge", (),
    "Available memory of the machine or the cgroup",
    "If it is low while kvd stays within its budget, another program uses the memory",
)  # fmt: skip
ACCELERATOR_LIMIT = Metric(
    "kvd_accelerator_limit_bytes", "gauge", (),
    "Maximum memory of the accelerator; absent without one",
    "Use it to choose a budget",
)  # fmt: skip
HOST_PRESSURE = Metric(
    "kvd_host_memory_pressure", "gauge", ("pressure",),
    "1 for the memory pressure that the system reports, 0 for the other values",
    "If the machine swaps, lower the budget or end other programs",
)  # fmt: skip
ACTIONS = Metric(
    "kvd_governor_actions_total", "counter", ("model", "kind"),
    "Actions to free memory, and refusals (docs/protocol.md lists the kinds of events)",
    "Steps down and preemptions mean that the budget is short; kvctl events lists them with "
    "their reasons",
)  # fmt: skip
REQUESTS = Metric(
    "kvd_requests", "gauge", ("model", "state"),
    "Requests in the daemon, by state: waiting, running or paused",
    "A growing number of waiting requests means too little memory or too few rows",
)  # fmt: skip
RECEIVED = Metric(
    "kvd_requests_received_total", "counter", MODEL,
    "Requests received; for unknown models the label model is empty",
    "The load in requests",
)  # fmt: skip
FINISHED = Metric(
    "kvd_requests_finished_total", "counter", ("model", "reason"),
    "Requests that finished without an error, by reason: stop, length or cancelled",
    "Many cancelled requests mean that clients give up",
)  # fmt: skip
FAILED = Metric(
    "kvd_requests_failed_total", "counter", ("model", "code"),
    "Requests that failed, by error code (docs/protocol.md)",
    "overloaded: more load than capacity. quarantined, worker_died, internal: see the log",
)  # fmt: skip
PAUSED = Metric(
    "kvd_requests_paused_total", "counter", ("model", "reason"),
    "Times that a request was paused, by reason: memory (preempted) or restart of its worker",
    "A rising count for memory means that requests wait because memory is short",
)  # fmt: skip
RESUMED = Metric(
    "kvd_requests_resumed_total", "counter", MODEL,
    "Times that a paused request resumed",
    "Follows kvd_requests_paused_total; if it falls behind, requests are paused: see kvd_requests",
)  # fmt: skip
QUEUE_TIME = Metric(
    "kvd_request_queue_time_seconds", "histogram", MODEL,
    "Time from a request's arrival until it is admitted, including loads of its model",
    "If the time to the first token is long, shows whether waiting or prefill is the cause",
    bounds.QUEUE_S,
)  # fmt: skip
FIRST_TOKEN = Metric(
    "kvd_time_to_first_token_seconds", "histogram", MODEL,
    "Time from a request's arrival until its first token is sent to the client",
    "The latency that users notice first",
    bounds.FIRST_TOKEN_S,
)  # fmt: skip
TOKEN_GAP = Metric(
    "kvd_inter_token_latency_seconds", "histogram", MODEL,
    "Time between two tokens of a completion, including pauses",
    "The smoothness of streams; long prompts of other requests and preemptions show in its tail",
    bounds.TOKEN_S,
)  # fmt: skip
WHOLE_TIME = Metric(
    "kvd_e2e_request_latency_seconds", "histogram", MODEL,
    "Time from a request's arrival to its end, for requests without an error",
    "Use it to choose client timeouts",
    bounds.REQUEST_S,
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "kvd_prompt_tokens_total", "counter", MODEL,
    "Prompt tokens of accepted requests",
    "The load in tokens",
)  # fmt: skip
COMPUTED_TOKENS = Metric(
    "kvd_prompt_tokens_computed_total", "counter", MODEL,
    "Prompt tokens that were prefilled, without prefix cache hits and including repetitions",
    "Above kvd_prompt_tokens_total, requests were replayed after a restart, or recomputed after "
    "they were preempted",
)  # fmt: skip
GENERATED = Metric(
    "kvd_generation_tokens_total", "counter", MODEL,
    "Generated tokens that were sent to clients",
    "The throughput",
)  # fmt: skip
PREFIX_LOOKUPS = Metric(
    "kvd_prefix_cache_lookups_total", "counter", MODEL,
    "Prompts that were looked up in the prefix cache",
    "Relate it to the token counts below",
)  # fmt: skip
PREFIX_QUERIES = Metric(
    "kvd_prefix_cache_query_tokens_total", "counter", MODEL,
    "Tokens of the prompts that were looked up",
    "The denominator of the hit ratio",
)  # fmt: skip
PREFIX_HITS = Metric(
    "kvd_prefix_cache_hit_tokens_total", "counter", MODEL,
    "Tokens that were found in the prefix cache and not prefilled",
    "If it is low although prompts share beginnings, raise prefix_cache or the budget",
)  # fmt: skip
PREFIX_EVICTED = Metric(
    "kvd_prefix_cache_evictions_total", "counter", MODEL,
    "Checkpoints that were evicted from the prefix cache",
    "Many evictions mean that the cache is too small for the working set",
)  # fmt: skip
CACHE_TOKENS = Metric(
    "kvd_prefix_cache_tokens_total", "counter", ("model", "reason"),
    "Prompt tokens by what the prefix cache did for them; memory and disk were not computed again",
    "kvctl explain --request lists the newest requests by the same reasons",
)  # fmt: skip
PREFIX_CHECKPOINTS = Metric(
    "kvd_prefix_cache_checkpoints", "gauge", MODEL,
    "Checkpoints in the prefix cache",
    "If it stays 0, nothing is cached",
)  # fmt: skip
PREFIX_BYTES = Metric(
    "kvd_prefix_cache_bytes", "gauge", MODEL,
    "Memory of the prefix cache; a part of the pages and tails",
    "Compare it with the setting prefix_cache",
)  # fmt: skip
STORE_BYTES = Metric(
    "kvd_prefix_store_bytes", "gauge", (),
    "Bytes of the prefix store on disk; absent without one",
    "At the limit, old prefixes are deleted for new ones",
)  # fmt: skip
STORE_LIMIT = Metric(
    "kvd_prefix_store_limit_bytes", "gauge", (),
    "Maximum bytes of the prefix store; absent without one",
    "The setting prefix_store.limit",
)  # fmt: skip
STORE_SEGMENTS = Metric(
    "kvd_prefix_store_segments", "gauge", (),
    "Segments in the prefix store; absent without one",
    "If it stays 0, nothing is stored: see kvd_prefix_store_refused_total",
)  # fmt: skip
STORE_ON = Metric(
    "kvd_prefix_store_on", "gauge", (),
    "1 while the prefix store works, 0 while its disk does not; absent without one",
    "At 0, kvctl status says why; requests are served without it",
)  # fmt: skip
STORE_HITS = Metric(
    "kvd_prefix_store_hits_total", "counter", MODEL,
    "Prompts that continued from the prefix store",
    "Shows whether the store is worth its space",
)  # fmt: skip
STORE_HIT_TOKENS = Metric(
    "kvd_prefix_store_hit_tokens_total", "counter", MODEL,
    "Tokens that were read from the prefix store and not prefilled",
    "Relate it to kvd_prompt_tokens_total",
)  # fmt: skip
STORE_SAVED = Metric(
    "kvd_prefix_store_saved_seconds_total", "counter", MODEL,
    "Seconds of prefill that the prefix store saved, less those of reading",
    "If it stays small, the disk is hardly faster than prefill",
)  # fmt: skip
STORE_WRITTEN = Metric(
    "kvd_prefix_store_written_bytes_total", "counter", MODEL,
    "Bytes of complete segments that a model wrote to the prefix store",
    "The wear of the disk",
)  # fmt: skip
STORE_READ = Metric(
    "kvd_prefix_store_read_bytes_total", "counter", MODEL,
    "Bytes that prompts read from the prefix store",
    "Relate it to kvd_prefix_store_written_bytes_total: what is never read only wears the disk",
)  # fmt: skip
STORE_EVICTED = Metric(
    "kvd_prefix_store_evictions_total", "counter", (),
    "Segments that were deleted for others; absent without a prefix store",
    "If it grows as fast as what is written, raise prefix_store.limit",
)  # fmt: skip
STORE_TODAY = Metric(
    "kvd_prefix_store_written_today_bytes", "gauge", (),
    "Bytes written to the prefix store since midnight UTC; absent without one",
    "The day's wear of the disk, incomplete files included",
)  # fmt: skip
STORE_DAILY = Metric(
    "kvd_prefix_store_daily_limit_bytes", "gauge", (),
    "Maximum bytes written to the prefix store in a day; absent without one",
    "The setting prefix_store.daily_writes",
)  # fmt: skip
STORE_REFUSED = Metric(
    "kvd_prefix_store_refused_total", "counter", ("model", "reason"),
    "Segments that were not written, by reason",
    "limit and daily_writes: raise the setting. keep_free: the disk is full. off: see kvctl status",
)  # fmt: skip
STATE = Metric(
    "kvd_model_state", "gauge", ("model", "state"),
    "1 for the state of a model, 0 for the other states",
    "backoff and failed mean that the worker died or could not load; unloaded models are absent",
)  # fmt: skip
UNLOADED = Metric(
    "kvd_models_unloaded", "gauge", (),
    "Unloaded models that requests can load",
    "Together with the loads it shows whether models displace each other",
)  # fmt: skip
INFO = Metric(
    "kvd_model_info", "gauge", ("model", "architecture", "dtype", "kv_scheme", "device"),
    "1, with the properties of a loaded model as labels",
    "Join these labels to other series",
)  # fmt: skip
ATTENTION = Metric(
    "kvd_attention_path_info", "gauge", ("model", "path"),
    "1, with the backend of decode attention that the probe chose at load",
    "If decoding is slower than expected: reference means that kernels were wrong, slow or "
    "absent",
)  # fmt: skip
ATTENTION_CALL = Metric(
    "kvd_attention_call_seconds", "gauge", ("model", "path"),
    "Time of decode attention per layer, measured at load, by path: fused or reference; "
    "absent without kernels",
    "If fused is not below reference, kernels are not used; other programs may have "
    "disturbed the measurement",
)  # fmt: skip
LOADS = Metric(
    "kvd_model_loads_total", "counter", MODEL,
    "Times that a model became ready",
    "A rise without restarts means that models displace each other in the budget",
)  # fmt: skip
RESTARTS = Metric(
    "kvd_worker_restarts_total", "counter", ("model", "reason"),
    "Restarts of a worker after its process was lost, by reason",
    "killed: a signal from outside. For all other reasons see the log",
)  # fmt: skip
STEPS = Metric(
    "kvd_worker_steps_total", "counter", MODEL,
    "Steps of a worker",
    "Tokens per step show how many requests share a step",
)  # fmt: skip
PHASES = Metric(
    "kvd_step_phase_seconds", "histogram", ("model", "phase"),
    "Time that a worker spent in a phase of its step: tokenize, prefill, decode, flush or pools",
    "Shows what delays tokens: prefill of other requests, pools that change size, or "
    "decoding itself",
    SPAN_BOUNDS_S,
)  # fmt: skip
FLUSHES = Metric(
    "kvd_kv_flushes_total", "counter", MODEL,
    "Times that full pages were written to the pools",
    "Relate it to the phase flush of kvd_step_phase_seconds",
)  # fmt: skip
LAUNCHES = Metric(
    "kvd_attention_kernel_launches_total", "counter", MODEL,
    "Launches of kvd's attention kernels by decode steps",
    "If it is 0 on an accelerator, see kvd_attention_path_info",
)  # fmt: skip
BUILD = Metric(
    "kvd_build_info", "gauge", ("version", "python"),
    "1, with the versions of kvd and Python as labels",
    "Shows which versions run",
)  # fmt: skip
DRAINING = Metric(
    "kvd_draining", "gauge", (),
    "1 while the daemon drains",
    "New requests are refused with the code draining",
)  # fmt: skip
LAG = Metric(
    "kvd_event_loop_lag_seconds", "histogram", (),
    "Delay of a timer in the daemon's event loop, measured ten times a second under load",
    "Above 50 ms in the tail, the daemon lacks CPU time and all streams are late",
    bounds.LAG_S,
)  # fmt: skip
HTTP = Metric(
    "kvd_http_responses_total", "counter", ("path", "code"),
    "HTTP responses by path and status; the label path is empty outside the API",
    "401 and 403: refused clients. 429 and 503: overload",
)  # fmt: skip
HTTP_IGNORED = Metric(
    "kvd_http_ignored_total", "counter", ("path", "what"),
    "What HTTP requests had and kvd ignored: fields, items, tools, and reasoning of other "
    "servers",
    "A rise after a client's update shows that the client uses something that kvd does not have",
)  # fmt: skip
FOOTPRINT = Metric(
    "kvd_process_footprint_bytes", "gauge", (),
    "Footprint of the daemon's process, without workers",
    "Steady growth is a bug",
)  # fmt: skip
CPU = Metric(
    "kvd_process_cpu_seconds_total", "counter", (),
    "CPU time of the daemon's process",
    "Near one second per second, the daemon is the bottleneck",
)  # fmt: skip
FILES = Metric(
    "kvd_process_open_fds", "gauge", (),
    "Open files and sockets of the daemon",
    "Near kvd_process_max_fds, connections are not closed",
)  # fmt: skip
MOST_FILES = Metric(
    "kvd_process_max_fds", "gauge", (),
    "Limit for open files and sockets of the daemon; absent without a limit",
    "Check it when connections are refused",
)  # fmt: skip
STARTED = Metric(
    "kvd_process_start_time_seconds", "gauge", (),
    "Start time of the daemon in seconds since 1970",
    "Shows restarts of the daemon",
)  # fmt: skip

GROUPS: dict[str, tuple[Metric, ...]] = {
    "Memory": (
        BUDGET, GRANTED, DEVICE_BUDGET, DEVICE_GRANTED, HOST_BUDGET, HOST_GRANTED,
        VIOLATIONS,
        MODEL_GRANTED, MODEL_FOOTPRINT, RANK_FOOTPRINT, MODEL_MEMORY,
        KV_LEVEL, KV_PAGES, START_LEVEL, RECLAIMABLE, ALLOCATOR_ACTIVE, ALLOCATOR_PEAK, HOST_MEMORY,
        HOST_AVAILABLE, ACCELERATOR_LIMIT, HOST_PRESSURE, ACTIONS,
    ),
    "Requests": (
        REQUESTS, RECEIVED, FINISHED, FAILED, PAUSED, RESUMED, QUEUE_TIME, FIRST_TOKEN, TOKEN_GAP,
        WHOLE_TIME,
    ),
    "Tokens and prompts": (
        PROMPT_TOKENS, COMPUTED_TOKENS, GENERATED, PREFIX_LOOKUPS, PREFIX_QUERIES, PREFIX_HITS,
        CACHE_TOKENS, PREFIX_EVICTED, PREFIX_CHECKPOINTS, PREFIX_BYTES,
    ),
    "The prefix store": (
        STORE_ON, STORE_BYTES, STORE_LIMIT, STORE_SEGMENTS, STORE_HITS, STORE_HIT_TOKENS,
        STORE_SAVED, STORE_WRITTEN, STORE_READ, STORE_EVICTED, STORE_TODAY, STORE_DAILY,
        STORE_REFUSED,
    ),
    "Models and workers": (
        STATE, UNLOADED, INFO, ATTENTION, ATTENTION_CALL, LOADS, RESTARTS, STEPS, PHASES, FLUSHES,
        LAUNCHES,
    ),
    "The daemon": (
        BUILD, DRAINING, LAG, HTTP, HTTP_IGNORED, FOOTPRINT, CPU, FILES, MOST_FILES, STARTED,
    ),
}  # fmt: skip
"""All metrics, in the order of exposition and documentation."""


def everything() -> list[Metric]:
    return [metric for metrics in GROUPS.values() for metric in metrics]

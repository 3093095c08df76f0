"""Arrow schemas of a sweep's tables: raw integers, units in names, one version number.

`trials` holds one row per attempt of a trial, failed ones included, and is written last:
a trial without its row did not happen. Every other table joins on (trial_id, attempt).
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = "1"

ADDED_LATER = frozenset(
    {"tags", "launch", "compat", "masked_share", "tokens_per_rank", "routing_digest"}
    | {"statistic", "loop", "timed_unix_ns", "timed_ns", "local_tp", "arrival", "rate_per_s"}
    | {"prompts", "prompts_digest"}
    | {"restarted_for", "router"}
    | {"cancel_share", "cancel_after_tokens"}
    | {"router_processes"}
    | {"moe_layers", "arm_kind"}
    | {"clients"}
)
"""Columns that folders of this version may lack: they were written before there was such a thing,
and read as null."""

_KEY = [("trial_id", pa.string()), ("attempt", pa.int32())]


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema(_KEY + list(fields), metadata={"ep_ray_schema_version": SCHEMA_VERSION})


TRIALS = _schema(
    ("sweep_id", pa.string()),
    ("experiment", pa.string()),
    ("measure", pa.string()),  # a2a | serving
    ("arm", pa.string()),
    ("cell", pa.string()),
    ("repeat", pa.int32()),
    ("status", pa.string()),  # ok | failed | timeout | crash | unavailable
    ("error", pa.string()),
    ("config_hash", pa.string()),
    ("config_json", pa.string()),
    ("started_unix_ns", pa.int64()),
    ("duration_ns", pa.int64()),
    ("backend", pa.string()),
    ("device", pa.string()),  # what was run on: a GPU's name, or the CPU's
    ("shared_gpu", pa.bool_()),
    ("transport_asked", pa.string()),
    ("transport_seen", pa.string()),
    ("transport_status", pa.string()),  # proved | unproved | contradicted | not_applicable
    # all-to-all cells
    ("phase", pa.string()),
    ("ep", pa.int32()),
    ("tokens", pa.int32()),
    ("hidden", pa.int32()),
    ("experts", pa.int32()),
    ("topk", pa.int32()),
    ("routing", pa.string()),
    ("dispatch_dtype", pa.string()),
    ("combine_dtype", pa.string()),
    # serving cells
    ("shape", pa.string()),
    ("concurrency", pa.int32()),  # of a closed loop; null in an open one
    ("requests", pa.int32()),
    ("tp", pa.int32()),
    ("dp", pa.int32()),
    # what ran, as JSON objects
    ("versions_json", pa.string()),
    ("hardware_json", pa.string()),
    ("env_json", pa.string()),  # effective NCCL_, FI_, UCX_, GLOO_, VLLM_ per rank
    ("tags", pa.string()),  # what telemetry says against the numbers; null where nothing does
    # further columns of all-to-all cells
    ("launch", pa.string()),  # eager | graph
    ("compat", pa.string()),  # whose way of measuring; null is the project's own
    ("masked_share", pa.float64()),
    ("tokens_per_rank", pa.string()),  # uniform | ragged | a list
    ("local_tp", pa.int32()),  # ranks that share `tokens`; 1 where none do
    ("routing_digest", pa.string()),  # SHA-256 of the routing file; null without one
    ("timed_unix_ns", pa.int64()),  # when rank 0 began its first sample
    ("timed_ns", pa.int64()),  # from there to the end of its last one
    # further columns of serving cells
    ("arrival", pa.string()),  # closed | poisson | gamma | ramp | trace; null was closed
    ("rate_per_s", pa.float64()),  # of an open loop, which has no concurrency
    ("prompts", pa.string()),  # token_ids | text | shared_prefix | conversations | trace
    ("prompts_digest", pa.string()),  # SHA-256 of the prompts' file; null without one
    ("restarted_for", pa.string()),  # why its group was started twice; null where once did
    ("router", pa.string()),  # policy of its router | vllm_router | none; null was not recorded
    ("cancel_share", pa.float64()),  # of measured requests, by the client; null where none are
    ("cancel_after_tokens", pa.int32()),
    ("router_processes", pa.int32()),  # of ep-ray's own router, on one port; null without it
    ("moe_layers", pa.int32()),  # of the model served; null for a dense or an unknown one
    ("arm_kind", pa.string()),  # arm.kind; null was not recorded
    ("clients", pa.int32()),  # processes that sent the load; null was one
)

# One row per operation of an all-to-all trial.
OPERATIONS = _schema(
    # dispatch | combine | pair | {dispatch,combine}_{send,recv} | pair_overlapped | work
    ("op", pa.string()),
    ("dedup", pa.string()),  # none | rank | node
    ("layout", pa.string()),
    ("timed_region", pa.string()),  # what is inside it, in words
    ("graph", pa.bool_()),
    ("warmup_iterations", pa.int32()),
    # largest over ranks, own share excluded; null where an operation is part of an exchange
    ("wire_bytes_out_max", pa.int64()),
    ("wire_bytes_in_max", pa.int64()),
    ("wire_bytes_total", pa.int64()),
    ("link_bytes_per_s", pa.float64()),  # measured in the same run
    ("bound_ns", pa.float64()),  # null at EP1, where nothing crosses
    ("max_over_mean_received_rows", pa.float64()),
    ("checked", pa.bool_()),
    ("statistic", pa.string()),  # how the headline is made of the samples, in words
    ("loop", pa.int32()),  # operations within one sample
)

# One row per timing. role: cold | warmup | measured | floor (the empty-event floor).
SAMPLES = _schema(
    ("op", pa.string()),
    ("role", pa.string()),
    ("rank", pa.int32()),
    ("iteration", pa.int32()),
    ("duration_ns", pa.int64()),
)

# One row per HTTP request. Times are CLOCK_MONOTONIC of the client's host.
REQUESTS = _schema(
    ("request_id", pa.string()),
    ("role", pa.string()),  # measured | warmup | calibration
    ("endpoint", pa.string()),  # as the router's response header names it; null without a router
    ("state", pa.string()),  # complete | failed | aborted
    ("reason", pa.string()),  # why it is not complete; `cancelled by the client` is no failure
    ("http_status", pa.int32()),
    ("finish_reason", pa.string()),
    ("prompt_tokens", pa.int32()),
    ("completion_tokens", pa.int32()),
    ("completion_tokens_source", pa.string()),  # usage | token_ids | text_chunks
    ("token_rule", pa.string()),  # continuous_usage | token_ids | text
    ("intended_ns", pa.int64()),
    ("sent_ns", pa.int64()),
    ("end_ns", pa.int64()),
    ("chunk_ns", pa.list_(pa.int64())),  # receive stamps of token-carrying chunks
    ("chunk_tokens", pa.list_(pa.int32())),  # tokens in each of them
)

# One row per serving cell.
CELLS = _schema(
    ("wall_ns", pa.int64()),
    ("in_flight_max", pa.int32()),
    ("client_lag_p99_ns", pa.int64()),
    ("client_lag_flag", pa.bool_()),
    ("plausibility", pa.string()),  # empty, or what does not fit, in words
)

# One row per endpoint and role of a serving cell; counts are differences over the cell.
LEDGER = _schema(
    ("endpoint", pa.string()),
    ("role", pa.string()),
    ("client_sent", pa.int64()),
    ("client_complete", pa.int64()),
    ("client_failed", pa.int64()),
    ("client_aborted", pa.int64()),
    ("router_forwarded", pa.int64()),  # null without a router that counts
    ("router_complete", pa.int64()),
    ("router_failed", pa.int64()),
    ("router_aborted", pa.int64()),
    ("router_retried", pa.int64()),
    ("engine_complete", pa.int64()),  # all roles of the cell together: on the row `all`
    ("engine_aborted", pa.int64()),
    ("agrees", pa.bool_()),
)

# One row per piece of evidence about what carried the traffic.
TRANSPORT = _schema(
    ("rank", pa.int32()),  # null for a machine, or all of them
    ("source", pa.string()),  # log | counters | links
    ("evidence", pa.string()),
    ("transport", pa.string()),  # what this evidence shows; null where it shows none
    ("bytes_seen", pa.int64()),
    ("bytes_expected", pa.int64()),
)

# One row per reading of the hardware around a trial.
TELEMETRY = _schema(
    ("unix_ns", pa.int64()),
    ("node", pa.string()),
    ("source", pa.string()),  # gpu0, cpu, ...
    ("name", pa.string()),  # sm_clock_mhz, power_w, load_1min, ...
    ("value", pa.float64()),
)

# One row per rank before an arm's first cell and after every cell: the router's status document,
# and whether the rank itself, asked directly, still generates a token.
STATUS = _schema(
    ("when", pa.string()),  # before | after
    ("endpoint", pa.string()),
    # the router's policy, or vllm_router; null without a router, as the next ones
    ("load_balance", pa.string()),
    ("desired", pa.int32()),  # ranks of the group
    ("ready", pa.int32()),  # ranks in selection
    ("parallelism", pa.string()),  # as declared, JSON
    ("registered", pa.bool_()),
    ("healthy", pa.bool_()),
    ("in_selection", pa.bool_()),  # null where a router does not say it, as circuit
    ("circuit", pa.string()),  # closed | open | half_open
    ("probe_ns", pa.int64()),  # one token, not streamed; null where none came
    ("probe_error", pa.string()),
)

# What a block's machines held after its engines had gone; under the block's last trial.
RELEASED = _schema(
    ("node", pa.string()),
    ("gpu", pa.string()),  # gpu0, ...; null for a machine without GPUs
    ("memory_used_mib", pa.float64()),
    ("processes", pa.int32()),  # that compute on the GPU
    ("left_behind", pa.string()),  # processes and ports of the arm, in words; empty for none
)

# One row per engine and reading while a serving cell ran, warm-up included.
RUNNING = _schema(
    ("endpoint", pa.string()),
    ("engine", pa.int32()),  # vLLM's index; null where the server does not say it
    # When all ranks were asked; CLOCK_MONOTONIC of the client's host, as in `requests`
    ("monotonic_ns", pa.int64()),
    ("running", pa.int32()),  # in the engine's batch
    ("waiting", pa.int32()),  # in its queue
)

# One row per engine of a serving cell, over the readings between the first measured request sent
# and the last one ended.
LOCKSTEP = _schema(
    ("endpoint", pa.string()),
    ("engine", pa.int32()),
    ("readings", pa.int32()),
    ("at_work", pa.int32()),  # of them, those in which any rank ran or held a request
    ("idle", pa.int32()),  # of those, the ones in which this rank ran none
    ("running_mean", pa.float64()),  # null without readings, as the next ones
    ("running_max", pa.int32()),
    ("waiting_mean", pa.float64()),
    ("skew", pa.float64()),  # of the cell: largest batch over mean batch of the ranks
)

TABLES: dict[str, pa.Schema] = {
    "trials": TRIALS,
    "operations": OPERATIONS,
    "samples": SAMPLES,
    "requests": REQUESTS,
    "cells": CELLS,
    "ledger": LEDGER,
    "transport": TRANSPORT,
    "telemetry": TELEMETRY,
    "status": STATUS,
    "released": RELEASED,
    "running": RUNNING,
    "lockstep": LOCKSTEP,
}

"""The four dashboards, each ordered by the questions of an operator."""

from __future__ import annotations

from observability.panels import (
    Dashboard,
    Panel,
    PanelQuery,
    Question,
    quantile,
    quantiles,
    rate,
    ratio,
)


def _one(expr: str, legend: str = "") -> tuple[PanelQuery, ...]:
    return (PanelQuery(expr, legend),)


FLEET = Dashboard(
    "rkserve-fleet",
    "rkserve: fleet",
    "The cluster at a glance.",
    (
        Question(
            "Does it serve?",
            (
                Panel(
                    100,
                    "Boards ready",
                    "Boards that serve now.",
                    _one('sum(rkserve_board_state{state="ready"})'),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    101,
                    "Boards not ready",
                    "Boards in any other state.",
                    _one(
                        "count(count by (board) (rkserve_board_state)) "
                        '- sum(rkserve_board_state{state="ready"})'
                    ),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    102,
                    "Routers up",
                    "Routers that answered the last scrape.",
                    _one("sum(rkserve_router_up)"),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    103,
                    "Answers in flight",
                    "Calls that are being answered.",
                    _one("sum(rkserve_requests_in_flight)"),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    104,
                    "Boards by state",
                    "Every state that some board is in.",
                    _one("sum by (state) (rkserve_board_state)", "{{state}}"),
                    width=24,
                ),
            ),
        ),
        Question(
            "How much does it do?",
            (
                Panel(
                    110,
                    "Tokens per second",
                    "Tokens of answers, over all boards of a model.",
                    _one(rate("rkserve_completion_tokens_total", "model"), "{{model}}"),
                ),
                Panel(
                    111,
                    "Running and waiting",
                    "Generations on boards, and those that wait at Routers.",
                    (
                        PanelQuery("sum by (model) (rkserve_board_running)", "{{model}} running"),
                        PanelQuery("sum by (model) (rkserve_queue_depth)", "{{model}} waiting"),
                    ),
                ),
            ),
        ),
        Question(
            "Do clients wait, or get errors?",
            (
                Panel(
                    120,
                    "Time to the first token",
                    "From a request's arrival at a Router to its first token.",
                    quantiles("rkserve_ttft_seconds"),
                    unit="s",
                ),
                Panel(
                    121,
                    "Ends of answers",
                    "Answers per second by their end; stop and length are in order.",
                    _one(rate("rkserve_finish_reasons_total", "reason"), "{{reason}}"),
                    unit="reqps",
                ),
            ),
        ),
    ),
)

REQUESTS = Dashboard(
    "rkserve-requests",
    "rkserve: requests",
    "What clients get, and what they ask for.",
    (
        Question(
            "How long do answers take?",
            (
                Panel(
                    200,
                    "Wait for a board",
                    "Time in the Routers' queues.",
                    quantiles("rkserve_queue_wait_seconds"),
                    unit="s",
                ),
                Panel(
                    201,
                    "Prefill",
                    "Time of prefill on the boards.",
                    quantiles("rkserve_request_prefill_seconds"),
                    unit="s",
                ),
                Panel(
                    202,
                    "Between two tokens",
                    "Inter-token latency at the Routers, without pauses.",
                    quantiles("rkserve_inter_token_seconds"),
                    unit="s",
                ),
                Panel(
                    203,
                    "Whole answers",
                    "From a request's arrival to the end of its answer.",
                    quantiles("rkserve_generation_seconds"),
                    unit="s",
                ),
            ),
        ),
        Question(
            "Is somebody turned away?",
            (
                Panel(
                    210,
                    "HTTP statuses",
                    "Calls per second by status.",
                    _one(rate("rkserve_requests_total", "status"), "{{status}}"),
                    unit="reqps",
                ),
                Panel(
                    211,
                    "Turned away",
                    "Generations without a place at a board, by the reason.",
                    _one(
                        rate("rkserve_turned_away_total", "model, reason"), "{{model}} {{reason}}"
                    ),
                    unit="reqps",
                ),
                Panel(
                    212,
                    "Errors by code",
                    "Generations that ended with an error.",
                    _one(rate("rkserve_generation_errors_total", "code"), "{{code}}"),
                    unit="reqps",
                ),
                Panel(
                    213,
                    "Failovers",
                    "Generations that lost their board and went on, by how it was lost.",
                    _one(rate("rkserve_continuations_total", "why"), "{{why}}"),
                    unit="reqps",
                ),
            ),
        ),
        Question(
            "What do clients ask for?",
            (
                Panel(
                    220,
                    "Tokens of prompts",
                    "Lengths of prompts.",
                    quantiles("rkserve_request_prompt_tokens"),
                ),
                Panel(
                    221,
                    "Tokens of answers",
                    "Lengths of answers.",
                    quantiles("rkserve_request_completion_tokens"),
                ),
                Panel(
                    222,
                    "Cached share of prompts",
                    "Prompt tokens that boards had in their KV caches.",
                    _one(
                        ratio(
                            "rkserve_cached_tokens_total", "rkserve_prompt_tokens_total", "model"
                        ),
                        "{{model}}",
                    ),
                    unit="percentunit",
                ),
                Panel(
                    223,
                    "Completion tokens by key",
                    "Usage by the names of API keys.",
                    _one(rate("rkserve_key_completion_tokens_total", "key"), "{{key}}"),
                ),
            ),
        ),
    ),
)

BOARDS = Dashboard(
    "rkserve-boards",
    "rkserve: boards",
    "Each board beside the others.",
    (
        Question(
            "Is one of them slower than the others?",
            (
                Panel(
                    300,
                    "Decoding speed",
                    "Tokens per second of decoding time, by board.",
                    _one(
                        ratio(
                            "rkserve_decode_tokens_total", "rkserve_decode_seconds_total", "board"
                        ),
                        "{{board}}",
                    ),
                ),
                Panel(
                    301,
                    "Tokens per second",
                    "Tokens of answers, by board.",
                    _one(rate("rkserve_completion_tokens_total", "board"), "{{board}}"),
                ),
                Panel(
                    302,
                    "Running and waiting",
                    "Generations on each board, and those that wait there.",
                    (
                        PanelQuery("sum by (board) (rkserve_board_running)", "{{board}} running"),
                        PanelQuery("sum by (board) (rkserve_board_queued)", "{{board}} waiting"),
                    ),
                ),
                Panel(
                    303,
                    "KV cache",
                    "Share of the KV cache's positions in use.",
                    _one(
                        "sum by (board) (rkserve_kv_positions) / "
                        "(sum by (board) (rkserve_kv_capacity) > 0)",
                        "{{board}}",
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        Question(
            "Is it the hardware?",
            (
                Panel(
                    310,
                    "Temperature",
                    "Of the NPU, or of the SoC.",
                    _one("max by (board) (rkserve_temperature_celsius)", "{{board}}"),
                    unit="celsius",
                ),
                Panel(
                    311,
                    "DDR clock",
                    "As a share of the highest clock.",
                    _one(
                        "max by (board) (rkserve_ddr_frequency_hertz) / "
                        "max by (board) (rkserve_ddr_max_frequency_hertz)",
                        "{{board}}",
                    ),
                    unit="percentunit",
                ),
                Panel(
                    312,
                    "NPU clock",
                    "As a share of the highest clock.",
                    _one(
                        "max by (board) (rkserve_npu_frequency_hertz) / "
                        "max by (board) (rkserve_npu_max_frequency_hertz)",
                        "{{board}}",
                    ),
                    unit="percentunit",
                ),
                Panel(
                    313,
                    "NPU load",
                    "The core that works most.",
                    _one("max by (board) (rkserve_npu_load_ratio)", "{{board}}"),
                    unit="percentunit",
                ),
                Panel(
                    314,
                    "Memory available",
                    "Memory that new work could have.",
                    _one("min by (board) (rkserve_memory_available_bytes)", "{{board}}"),
                    unit="bytes",
                ),
                Panel(
                    315,
                    "Disk free",
                    "Of the disk of the state folder.",
                    _one("min by (board) (rkserve_disk_free_bytes)", "{{board}}"),
                    unit="bytes",
                ),
            ),
        ),
        Question(
            "Do its engines end?",
            (
                Panel(
                    320,
                    "Engine starts",
                    "Engine processes that loaded, in an hour.",
                    _one("sum by (board) (increase(rkserve_engine_starts_total[1h]))", "{{board}}"),
                ),
                Panel(
                    321,
                    "Prompt caches",
                    "Files of prompt caches on each board.",
                    _one("sum by (board) (rkserve_prompt_cache_bytes)", "{{board}}"),
                    unit="bytes",
                ),
            ),
        ),
    ),
)

CONTROL = Dashboard(
    "rkserve-control",
    "rkserve: control",
    "Routers, the Coordinator, and changes of the cluster.",
    (
        Question(
            "Is something held or behind?",
            (
                Panel(
                    400,
                    "Boards behind",
                    "Boards that do not obey the latest desired state.",
                    _one("max(rkserve_boards_behind)"),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    401,
                    "Pauses",
                    "Pauses of parts of the cluster.",
                    _one("max(rkserve_pauses_in_force)"),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    402,
                    "Sleeps",
                    "Sleeps of parts of the cluster.",
                    _one("max(rkserve_sleeps_in_force)"),
                    kind="stat",
                    width=6,
                ),
                Panel(
                    403,
                    "Epoch",
                    "Epoch of the desired state.",
                    _one("max(rkserve_desired_epoch)"),
                    kind="stat",
                    width=6,
                ),
            ),
        ),
        Question(
            "What has been changed?",
            (
                Panel(
                    410,
                    "Operations",
                    "Operations that are over, by kind and how they ended.",
                    _one(
                        "sum by (kind, state) (increase(rkserve_operations_total[1h]))",
                        "{{kind}} {{state}}",
                    ),
                ),
                Panel(
                    411,
                    "Time of operations",
                    "From a control call to its end, 95th percentile of an hour.",
                    _one(quantile(0.95, "rkserve_operation_seconds", "kind", "1h"), "{{kind}}"),
                    unit="s",
                ),
                Panel(
                    412,
                    "Broadcasts",
                    "From a new desired state to the last board's answer, over an hour.",
                    quantiles("rkserve_broadcast_seconds", "", "1h"),
                    unit="s",
                ),
                Panel(
                    413,
                    "Configurations",
                    "Routers by the digest of their configuration; two are a redeployment.",
                    _one("count by (digest) (rkserve_config_info)", "{{digest}}"),
                ),
            ),
        ),
        Question(
            "Do Routers work as they should?",
            (
                Panel(
                    420,
                    "Choice of a board",
                    "Time that one choice took.",
                    quantiles("rkserve_routing_decision_seconds", ""),
                    unit="s",
                ),
                Panel(
                    421,
                    "Ways of tokens",
                    "Generations by the way of their tokens: the channel, or Ray.",
                    _one(rate("rkserve_token_streams_total", "path"), "{{path}}"),
                    unit="reqps",
                ),
            ),
        ),
    ),
)

DASHBOARDS = {"fleet": FLEET, "requests": REQUESTS, "boards": BOARDS, "control": CONTROL}

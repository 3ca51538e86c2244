# SPDX-License-Identifier: Apache-2.0
"""What vLLM's log says. `logs/` holds logs of starts: real ones of vLLM 0.32.0 on a CPU where that machine could have
the failure (paths renamed, quoted source lines taken out), else in the shapes of the releases that they name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ansible.module_utils.aerie.vllm_log import PHASES, parse_records, read_phase, read_progress, root_cause, tap_ids
from hypothesis import given
from hypothesis import strategies as st

LOGS = Path(__file__).parent / "logs"

# log -> (kind, a part of the root-cause line)
FAILURES = {
    "bad_config": ("model_config", "config file at '/srv/models/kimi/config.json' is not a valid JSON file"),
    "bad_option": ("option", "unrecognized arguments: --max-modl-len 512"),
    "bad_tokenizer": ("tokenizer", "JSONDecodeError: Expecting ',' delimiter"),
    "cuda_out_of_memory": ("cuda_out_of_memory", "Tried to allocate 896.00 MiB. GPU 1"),
    "drafter_shape": ("shape_mismatch", "torch.Size([128, 256])to a parameter of size torch.Size([128, 384])"),
    "driver_too_old": ("nvidia_driver_too_old", "found version 12080"),
    "eagle3_allow_list": ("eagle3_interface", "SpeculativeConfig: Eagle3 is only supported for ['llama'"),
    "eagle3_interface": ("eagle3_interface", "RuntimeError: Model does not support EAGLE3 interface"),
    "eagle3_pipeline": ("eagle3_pipeline", "does not support eagle3 with pipeline parallelism"),
    "engine_killed": ("killed", "Failed core proc(s): {}"),
    "executable_missing": ("executable_missing", "executable /opt/aerie/current/venv/bin/vllm"),
    "gloo_interface": ("gloo", "connectFullMesh failed"),
    "gpu_memory_taken": ("gpu_memory_taken", "12.63/139.81 GiB"),
    "kv_small": ("kv_cache_too_small", "max seq len (512)"),
    "max_len": ("max_model_len", "ModelConfig: User-specified max_model_len (9999999) is greater"),
    "middleware_missing": ("module_missing", "No module named 'aerie_api_keys'"),
    "missing_model": ("model_path", "'/srv/models/Kimi-K2.5'"),
    "missing_weights": ("weights_missing", "Cannot find any model weights with `/srv/models/kimi`"),
    "nccl_shared_memory": ("shared_memory_full", "Error while creating shared memory segment /dev/shm/nccl-Wb1eXv"),
    "no_compiler": ("compiler", "Failed to find C compiler"),
    "no_libnuma": ("library_missing", "ImportError('libnuma.so.1: cannot open shared object file"),
    "no_tokenizer": ("tokenizer", "Couldn't instantiate the backend tokenizer"),
    "oom_killer": ("oom_killer", "killed by the OOM killer"),
    "permission": ("permission", "Permission denied: '/srv/models/Kimi-K2.5/config.json'"),
    "port_in_use": ("port_in_use", "[Errno 98] Address already in use"),
    "ray_worker": ("no_gpu", "No CUDA GPUs are available"),
    "replica_part": ("replica", "10.77.11.12 is gone"),
    "spec_method": ("speculation_options", "SpeculativeConfig: method: Input should be 'ngram'"),
    "spec_pp": ("unknown", "AttributeError: 'CPUModelRunner' object has no attribute 'drafter'"),
    "spec_tokens": ("speculation_options", "num_speculative_tokens: Input should be greater than 0"),
    "truncated_shard": ("weights_damaged", "SafetensorError: Error while deserializing header"),
    "worker_segfault": ("crashed", "Fatal Python error: Segmentation fault"),
}
UNDER_WAY = {
    "loading": ("loading weights", 40, None),
    "capturing": ("capturing graphs", 41, [2, 30, 58]),
    "ready": ("serving", None, [2, 4, 6]),
}


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def test_every_log_of_the_corpus_has_an_expectation() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == FAILURES.keys() | UNDER_WAY.keys()


@pytest.mark.parametrize("name", FAILURES)
def test_root_cause_of_a_failed_start(name: str) -> None:
    kind, part = FAILURES[name]
    cause = root_cause(lines_of(name))
    assert cause is not None
    assert (cause.kind, part in cause.line) == (kind, True), cause
    assert bool(cause.remedy) == (kind != "unknown")


@pytest.mark.parametrize("name", UNDER_WAY)
def test_phase_of_a_start_that_goes_well(name: str) -> None:
    lines = lines_of(name)
    phase, percent, taps = UNDER_WAY[name]
    assert (*read_phase(lines), tap_ids(lines), root_cause(lines)) == (phase, percent, taps, None)


def test_phases_of_a_real_start_never_go_back() -> None:
    lines = lines_of("ready")
    ranks = [PHASES.index(read_phase(lines[:count]).name) for count in range(0, len(lines) + 1, 3)]
    assert ranks == sorted(ranks)
    # This start ran eagerly: no compilation and no graphs.
    assert {PHASES[rank] for rank in ranks} >= {"starting", "loading weights", "loading drafter", "serving"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\rLoading safetensors checkpoint shards:   3% Completed | 1/64 [00:02<02:20,  2.2s/it]\n", 3),
        (
            "\x1b[0;36m(Worker_TP0 pid=3)\x1b[0;0m Loading pt checkpoint shards: 50% Completed | 1/2 [00:01<?, ?it/s]",
            50,
        ),
        ("Multi-thread loading shards: 100% Completed | 9/9 [00:01<00:00, 1.2it/s]", 100),
        ("Loading safetensors using Runai Model Streamer:  12% Completed | 9/70 [00:01<00:00, 1.2it/s]", 12),
    ],
)
def test_percentage_of_every_loader(text: str, expected: int) -> None:
    assert read_phase([text]) == ("loading weights", expected)


@pytest.mark.parametrize(
    ("text", "phase", "numbers"),
    [
        # 0.15 to 0.33.
        (
            "Loading safetensors checkpoint shards:  41% Completed | 26/64 [00:52<01:26,  2.31s/it]",
            "loading weights",
            (41, 26, 64, 52.0, 26 / 64),
        ),
        (
            "Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]",
            "loading weights",
            (0, 0, 64, 0.0, 0.0),
        ),
        (
            "Loading safetensors checkpoint shards: 99% Completed | 63/64 [1:02:03<00:59, 59.10s/it]",
            "loading weights",
            (99, 63, 64, 3723.0, 63 / 64),
        ),
        # A bar that counts bytes.
        (
            "Loading safetensors using InstantTensor loader:  12% Completed | 71.2G/595G [00:20<02:27, 3.6GB/s]",
            "loading weights",
            (12, None, None, 20.0, 0.12),
        ),
        # 0.21 and newer, a log line without a bar.
        (
            "(Worker_TP0 pid=9) INFO 11-29 09:11:07 [weight_utils.py:1043] Prefetching checkpoint files: 10% (6/64)",
            "loading weights",
            (10, None, None, None, 0.1),
        ),
        (
            "Fetching 64 files:  19%|#9        | 12/64 [00:10<00:43,  1.19it/s]",
            "downloading",
            (19, 12, 64, 10.0, 12 / 64),
        ),
        (
            "model-00001-of-000064.safetensors:  12%|#2        | 1.20G/9.81G [00:10<01:12, 119MB/s]",
            "downloading",
            (None, None, None, None, None),
        ),
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  41%|####1     | 21/51 [00:03<00:04, 6.81it/s]",
            "capturing graphs",
            (41, 21, 51, 3.0, 21 / 51),
        ),
        (
            "Capturing CUDA graphs (decode, FULL): 100%|##########| 35/35 [00:03<00:00, 9.9it/s]",
            "capturing graphs",
            (100, 35, 35, 3.0, 1.0),
        ),
    ],
)
def test_every_bar_is_read(text: str, phase: str, numbers: tuple[object, ...]) -> None:
    progress = read_progress([text])
    assert progress.phase == phase
    assert (progress.percent, progress.done, progress.total, progress.bar_s, progress.fraction) == numbers


def test_what_loading_took_is_kept_from_the_target() -> None:
    lines = [
        "(Worker pid=9) INFO 11-29 17:48:01 [default_loader.py:501] Loading weights took 52.10 seconds",
        "(Worker pid=9) INFO 11-29 17:48:02 [cpu_model_runner.py:75] Loading drafter model...",
        "(Worker pid=9) INFO 11-29 17:48:03 [default_loader.py:501] Loading weights took 0.50 seconds",
        "(EngineCore pid=8) INFO 11-29 17:48:04 [core.py:402] init engine (profile, create kv cache) took 0.12 s",
    ]
    assert read_progress(lines).loaded_s == 52.1
    assert read_progress(lines).phase == "warming up"


def test_a_download_is_seen_though_loading_was_announced() -> None:
    announced = "(Worker pid=9) INFO 11-29 17:48:01 [gpu_model_runner.py:3808] Starting to load model org/kimi..."
    fetching = "Fetching 64 files:  19%|#9        | 12/64 [00:10<00:43,  1.19it/s]"
    loading = "Loading safetensors checkpoint shards:   3% Completed | 2/64 [00:04<01:02,  2.31s/it]"
    lines = [announced, fetching, loading, fetching]
    assert [read_phase(lines[:count]).name for count in (1, 2, 3, 4)] == [
        "loading weights",
        "downloading",
        "loading weights",
        "loading weights",
    ]


def test_the_mark_moves_with_the_start_and_not_with_what_vllm_repeats() -> None:
    bar = "Loading safetensors checkpoint shards:   3% Completed | {}/64 [00:04<01:02,  2.31s/it]"
    waits = "(APIServer pid=1) DEBUG 11-29 09:{}:07 [utils.py:961] Waiting for 1 local, 0 remote core engine proc(s)."
    stalls = "(Worker_TP0 pid=3) INFO 11-29 09:{}:07 [shm_broadcast.py:501] No available shared memory broadcast block."
    first = [bar.format(2), waits.format(10), stalls.format(10)]
    moved = read_progress(first).mark
    assert read_progress([*first, waits.format(11), stalls.format(12), bar.format(2)]).mark == moved
    assert read_progress([*first, bar.format(3)]).mark != moved
    assert read_progress([*first, "Something new"]).mark != moved


def test_reading_ahead_does_not_hide_what_is_loaded() -> None:
    ahead = "(Worker_TP0 pid=9) INFO 11-29 09:11:07 [weight_utils.py:1043] Prefetching checkpoint files: {}% (6/64)"
    bar = "Loading safetensors checkpoint shards:   3% Completed | 2/64 [00:04<01:02,  2.31s/it]"
    assert read_phase([ahead.format(10)]).percent == 10
    assert read_phase([ahead.format(10), bar, ahead.format(20)]).percent == 3


def test_a_slow_worker_does_not_bring_the_phase_back() -> None:
    lines = [
        "(Worker_TP0 pid=3) INFO 11-29 09:11:07 [backends.py:1167] Dynamo bytecode transform time: 12.10 s",
        "(Worker_TP7 pid=9) INFO 11-29 09:11:09 [gpu_model_runner.py:5040] Starting to load model /srv/models/kimi...",
    ]
    assert read_phase(lines) == ("compiling", None)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[gpu_model_runner.py:4104] Using auxiliary layers from speculative config: (2, 30, 58)", [2, 30, 58]),
        ("[eagle3_utils.py:27] Using Eagle3 auxiliary layers from config: [1, 29, 57]", [1, 29, 57]),
        ("[eagle3_utils.py:30] Using Eagle3 auxiliary layers from model: (7,)", [7]),
        ("[eagle3_utils.py:30] Using Eagle3 of something else: (7,)", None),
    ],
)
def test_tap_ids_in_the_words_of_both_model_runners(message: str, expected: list[int] | None) -> None:
    assert tap_ids([f"(EngineCore pid=5) INFO 11-29 09:11:07 {message}"]) == expected


def test_a_warning_that_quotes_an_error_is_no_cause() -> None:
    line = (
        "(APIServer pid=1) WARNING 11-29 09:11:07 [system_utils.py:255] like `OSError: [Errno 24] Too many open files`"
    )
    assert root_cause([line]) is None


def test_an_exception_of_a_background_thread_is_not_preferred() -> None:
    lines = [
        "Exception in thread Thread-3 (_report_usage_worker):",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.12/threading.py", line 1073, in _bootstrap_inner',
        "OSError: [Errno 30] Read-only file system: '/nonexistent'",
        "Traceback (most recent call last):",
        '  File "/opt/vllm/entry.py", line 3, in main',
        "OSError: [Errno 99] Cannot assign requested address",
    ]
    cause = root_cause(lines)
    assert cause is not None
    assert cause.kind == "address_not_here"


def test_of_a_chain_the_last_link_is_the_cause() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/a.py", line 1, in <module>',
        "KeyError: 'kimi_k9'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "/a.py", line 2, in <module>',
        "ValueError: Model architectures ['KimiK9'] are not supported for now.",
    ]
    cause = root_cause(lines)
    assert cause is not None
    assert cause.kind == "architecture_unknown"


def test_records_name_their_process_and_level() -> None:
    nested = "(EngineCore_DP0 pid=2) (RayWorkerWrapper pid=8, ip=10.0.0.2) ERROR 11-29 09:11:07 [w.py:3] boom\rnext"
    assert parse_records([nested]) == [("RayWorkerWrapper pid=8", "ERROR", "boom"), ("", "", "next")]


# Text that looks like the real thing: pieces of the corpus in any order, cut anywhere, with anything in between.
PIECES = sorted({line for name in [*FAILURES, *UNDER_WAY] for line in lines_of(name) if len(line) < 300})
LINE = st.one_of(st.text(), st.sampled_from(PIECES), st.sampled_from(PIECES).flatmap(lambda piece: st.just(piece[3:])))


@given(st.lists(LINE, max_size=40))
def test_any_text_is_read_without_an_exception(lines: list[str]) -> None:
    phase = read_phase(lines)
    assert phase.name in PHASES
    assert phase.percent is None or 0 <= phase.percent <= 100
    cause = root_cause(lines)
    assert cause is None or cause.line
    assert tap_ids(lines) is None or all(isinstance(item, int) for item in tap_ids(lines) or [])


# journald cuts a line at 48 KiB.
@pytest.mark.parametrize(
    "piece",
    ["a", "a.", "(", "\x1b[", " ", "\r", "Traceback (most recent call last):", "Failed core proc(s): {", "error: "],
)
def test_time_is_bounded(piece: str) -> None:
    lines = [piece * (48_000 // len(piece)), "Traceback (most recent call last):", "ValueError: x"] * 200
    began = time.process_time()
    read_phase(lines)
    root_cause(lines)
    assert time.process_time() - began < 10

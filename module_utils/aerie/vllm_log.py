# SPDX-License-Identifier: Apache-2.0
"""What vLLM's log says: how far a start is, why it failed, which taps the drafter reads.

Pure functions over the lines of one start (one systemd invocation), oldest first. They accept any text, never raise,
and take time linear in it. The messages are those of vLLM 0.15 to 0.33, read in the released sources and in logs of
real starts; `tests/unit/logs/` holds the corpus.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

STARTING = "starting"
DOWNLOADING = "downloading"
LOADING = "loading weights"
LOADING_DRAFTER = "loading drafter"
COMPILING = "compiling"
CAPTURING = "capturing graphs"
WARMING_UP = "warming up"
SERVING = "serving"

# In the order in which a start passes through them.
PHASES = (STARTING, DOWNLOADING, LOADING, LOADING_DRAFTER, COMPILING, CAPTURING, WARMING_UP, SERVING)

# A longer line is cut: tracebacks and progress are shorter, and a dumped config or request must not cost time.
_MAX_LINE = 2000

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Process names, possibly nested: `(EngineCore_DP0 pid=9)`, `(RayWorkerWrapper pid=7, ip=10.0.0.2)`.
_SOURCE = re.compile(r"\((?P<source>[^()\s]{1,64} pid=\d{1,10})(?:, ip=[^()\s]{1,64})?\)\s?")
_STAMP = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})? \[[^\]]{1,200}\] ?"
)

_PERCENT = re.compile(r"(\d{1,3})%")
# How far a bar is: `26/64 [00:52<01:26,` or `1.2G/9.8G [00:10<01:12,`, from 0.15 to 0.33.
_COUNT = re.compile(r"\b(\d{1,9})/(\d{1,9}) \[")
_ELAPSED = re.compile(r"\[((?:\d{1,4}:){1,3}\d\d)<")
_LOADED = re.compile(r"Loading weights took (\d{1,7}(?:\.\d{1,6})?) seconds")
# What a line says, but for the numbers in it.
_NUMBERS = re.compile(r"\d+")
# (phase, what a log line says when that phase begins or goes on). The CPU runner's "Warming up model for the
# compilation" comes before the compilation, and the KV cache's size is the last thing said before graphs are captured.
_PHASE_SIGNS = (
    (SERVING, re.compile(r"Application startup complete|Starting vLLM (?:API )?server (?:\d+ )?on ")),
    (
        WARMING_UP,
        re.compile(r"Graph capturing finished|init engine \(profile|Warming up (?!model for the compilation)"),
    ),
    (CAPTURING, re.compile(r"Capturing [\w -]{0,40}(?:CUDA )?graphs|GPU KV cache size:")),
    (
        COMPILING,
        re.compile(
            r"Starting torch\.compile|torch\.compile takes|for vLLM's torch\.compile|Dynamo bytecode transform time"
            r"|Compiling a graph for|Directly load (?:the compiled|AOT)|Warming up model for the compilation"
        ),
    ),
    (LOADING_DRAFTER, re.compile(r"Loading drafter model")),
    # The bars of the hub's client, of which vLLM shows one for each file.
    (
        DOWNLOADING,
        re.compile(r"^Fetching \d{1,6} files:|^[\w.-]{1,120}\.(?:safetensors|bin|json|model|tiktoken): +\d{1,3}%\|"),
    ),
    (
        LOADING,
        re.compile(
            r"Starting to load model|oading [\w -]{0,40}shards:|Loading (?:safetensors )?using "
            r"|Prefetching checkpoint files: "
        ),
    ),
)
_PROGRESS = re.compile(
    r"oading [\w -]{0,60}(?:shards|Streamer|loader): {0,3}\d{1,3}% |^Capturing |^Fetching \d{1,6} files:"
    r"|Prefetching checkpoint files: "
)

_TAPS = re.compile(r"Using (?:Eagle3 )?auxiliary layers from [\w ]{1,40}: [\[(]([\d, ]*)[\])]")


class Phase(NamedTuple):
    """How far a start is: one of PHASES, and the percentage where vLLM reports one."""

    name: str
    percent: int | None


class Progress(NamedTuple):
    """How far a start is, with what its newest bar of that phase says.

    ``done`` of ``total`` files (or graphs) took ``bar_s`` seconds; ``loaded_s`` is how long loading the target took,
    once it is over. None where the log does not tell. ``mark`` changes when the start moves on: by a phase, a step of
    a bar, or a line that says something new. The lines that vLLM repeats while it waits do not count.
    """

    phase: str = STARTING
    percent: int | None = None
    done: int | None = None
    total: int | None = None
    bar_s: float | None = None
    loaded_s: float | None = None
    mark: str = ""

    @property
    def fraction(self) -> float | None:
        """Return how much of the phase is done, from 0 to 1: finer than the percentage where the bar counts."""
        if self.done is not None and self.total:
            return min(self.done / self.total, 1.0)
        return self.percent / 100 if self.percent is not None else None


class Cause(NamedTuple):
    """Why a start failed.

    ``line`` is the root-cause line without process and time stamps; ``remedy`` a sentence, empty where none is known;
    ``kind`` a stable short name of the known cause, or `unknown`.
    """

    line: str
    remedy: str
    kind: str


class Record(NamedTuple):
    """One log line: the process that wrote it and the level, both empty where the line does not tell."""

    source: str
    level: str
    text: str


def parse_records(lines: Iterable[str]) -> list[Record]:
    """Split raw log lines into records. A carriage return, as progress bars write it, ends a record too."""
    records = []
    for raw in lines:
        for piece in raw.replace("\r", "\n").split("\n"):
            if piece:
                records.append(_parse_record(piece[:_MAX_LINE]))
    return records


def _parse_record(line: str) -> Record:
    text = _ANSI.sub("", line)
    source = ""
    while match := _SOURCE.match(text):
        source = match["source"]
        text = text[match.end() :]
    level = ""
    if match := _STAMP.match(text):
        level = match["level"]
        text = text[match.end() :]
    return Record(source, level, text)


def read_phase(lines: Iterable[str]) -> Phase:
    """Return the furthest phase that the log reached, with the newest percentage of that phase."""
    progress = read_progress(lines)
    return Phase(progress.phase, progress.percent)


def read_progress(lines: Iterable[str]) -> Progress:
    """Return how far the start is.

    The furthest phase and not the newest: with several workers the slower ones still report one that the first left.
    """
    progress = Progress()
    said = set()
    for record in parse_records(lines):
        said.add(_NUMBERS.sub("0", record.text))
        if progress.loaded_s is None and (loaded := _LOADED.search(record.text)):
            progress = progress._replace(loaded_s=float(loaded[1]))
        phase = _phase_sign(record.text)
        if phase is not None:
            progress = _advanced(progress, phase, record.text)
    mark = f"{progress.phase}, {progress.percent} %, {progress.done}, {len(said)} lines"
    return progress._replace(mark=mark)


def _advanced(progress: Progress, phase: str, text: str) -> Progress:
    """Return ``progress`` after a line of ``phase``."""
    reached = progress.phase
    # Every checkpoint is read with the same bar; once the drafter's load is announced, the bar is the drafter's.
    if phase == LOADING and reached == LOADING_DRAFTER:
        phase = reached
    # vLLM announces that it loads, and finds only then that it has to fetch.
    fetches_first = phase == DOWNLOADING and reached == LOADING and progress.percent is None
    if PHASES.index(phase) < PHASES.index(reached) and not fetches_first:
        return progress
    if phase != reached:
        progress = Progress(phase, loaded_s=progress.loaded_s)
    return _with_bar(progress, text)


def _with_bar(progress: Progress, text: str) -> Progress:
    percent = _PERCENT.search(text)
    if percent is None or not _PROGRESS.search(text):
        return progress
    count = _COUNT.search(text)
    elapsed = _ELAPSED.search(text)
    if elapsed is None and progress.bar_s is not None:
        # vLLM reads files ahead in the background; the bar says how many are loaded.
        return progress
    return progress._replace(
        percent=min(int(percent[1]), 100),
        done=int(count[1]) if count else None,
        total=int(count[2]) if count else None,
        bar_s=_seconds(elapsed[1]) if elapsed else None,
    )


def _seconds(clock: str) -> float:
    """Return the seconds of `52:10` or `1:02:03`."""
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part)
    return float(total)


def _phase_sign(text: str) -> str | None:
    return next((phase for phase, sign in _PHASE_SIGNS if sign.search(text)), None)


def tap_ids(lines: Iterable[str]) -> list[int] | None:
    """Return the auxiliary hidden-state layer ids that vLLM says it uses, or None where the log does not name them.

    Model Runner V2 logs them wherever they come from; Model Runner V1 only when the drafter's config declares them.
    """
    ids = None
    for record in parse_records(lines):
        if match := _TAPS.search(record.text):
            # int() refuses absurdly long digit strings; a layer id has a few digits.
            ids = [int(part) for part in re.findall(r"\d{1,9}", match[1])]
    return ids


class _Rule(NamedTuple):
    kind: str
    line: re.Pattern[str]
    remedy: str
    frames: re.Pattern[str] | None = None


def _rule(kind: str, line: str, remedy: str, frames: str | None = None) -> _Rule:
    return _Rule(kind, re.compile(line), remedy, re.compile(frames) if frames else None)


_SHAPE_REMEDY = (
    "A weight has another shape than its config implies: do drafter, target and their configs belong together?"
)

# The first rule that fits the root-cause line (and the files of its traceback, where `frames` is given) is taken.
_RULES = (
    _rule(
        "oom_killer",
        r"killed by the OOM killer|result 'oom-kill'|Out of memory: Killed process",
        "The host's RAM or the unit's MemoryMax is too small for this model: raise it, or stop what else uses memory.",
    ),
    _rule(
        "gpu_memory_taken",
        r"Free memory on device .{0,200}less than desired GPU memory utilization",
        "Something else holds GPU memory (nvidia-smi lists it): stop it, or lower gpu-memory-utilization.",
    ),
    _rule(
        "cuda_out_of_memory",
        r"CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation",
        "Lower gpu-memory-utilization, max-num-seqs or max-model-len, or spread the model over more GPUs.",
    ),
    _rule(
        "kv_cache_too_small",
        r"KV cache is needed, which is larger|No available memory for the cache blocks"
        r"|is larger than the maximum number of tokens that can be stored in KV cache",
        "Lower max-model-len, or give the KV cache more memory (gpu-memory-utilization, more GPUs).",
    ),
    _rule(
        "nvidia_driver_too_old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "Update the NVIDIA driver (a CUDA 13 build needs 580 or newer), or deploy a vLLM built for an older CUDA.",
    ),
    _rule(
        "no_gpu",
        r"Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device",
        "The service sees no GPU: check `nvidia-smi`, the /dev/nvidia* nodes and the unit's DeviceAllow.",
    ),
    _rule(
        "gpu_not_supported",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation",
        "This build has no code for this GPU generation: deploy a build that supports its compute capability.",
    ),
    _rule(
        "gpu_count",
        r"World size \(\d{1,6}\) is larger than the number of available GPUs",
        "Lower tensor-parallel-size or pipeline-parallel-size to the GPUs that the service sees.",
    ),
    _rule(
        "shared_memory_full",
        r"/dev/shm.{0,120}No space left|No space left on device.{0,80}/dev/shm|shm_open",
        "/dev/shm is full or too small: raise its size, and remove segments that nothing uses.",
    ),
    _rule(
        "nccl",
        r"NCCL error|DistBackendError|nccl[A-Z]\w{2,30}Error",
        "NCCL_DEBUG=INFO shows the reason: often /dev/shm or memlock is too small, or NCCL_SOCKET_IFNAME wrong.",
    ),
    _rule(
        "gloo",
        r"Gloo connectFullMesh failed",
        "Set VLLM_HOST_IP and GLOO_SOCKET_IFNAME to this host's own address and interface.",
    ),
    _rule(
        "port_in_use",
        r"Address already in use|EADDRINUSE",
        "Another process listens on the port (`ss -ltnp` names it): stop it, or choose another port.",
    ),
    _rule(
        "address_not_here",
        r"Cannot assign requested address",
        "The address to listen on is not one of this host's: correct the host option.",
    ),
    _rule(
        "weights_missing",
        r"Cannot find any model weights|following weights were not initialized",
        "The checkpoint on the host is incomplete: copy its weight files again.",
    ),
    _rule(
        "weights_damaged",
        r"SafetensorError|incomplete metadata, file not fully covered|PytorchStreamReader failed",
        "A weight file is truncated or damaged: compare sizes and sha256 with the source, and copy it again.",
    ),
    _rule(
        "model_path",
        r"Repo id must be in the form|LocalEntryNotFoundError|couldn't connect to 'https?://|is not a local folder",
        "The model path does not exist on this host or is no model directory: correct it, or copy the model there.",
    ),
    _rule(
        "remote_code",
        r"trust_remote_code|trust-remote-code",
        "The model brings its own code: review it, then set trust-remote-code for it.",
    ),
    _rule(
        "tokenizer",
        r"Couldn't instantiate the backend tokenizer|Can't load tokenizer|tokenizer\.json|tiktoken",
        "The tokenizer files of the model are missing or damaged: copy them again.",
    ),
    _rule(
        "tokenizer",
        r"JSONDecodeError|UnicodeDecodeError|^Exception: ",
        "A tokenizer file of the model is missing or damaged: copy the tokenizer files again.",
        frames=r"tokeniz",
    ),
    _rule(
        "model_config",
        r"is not a valid JSON file|Unrecognized model in|should have a `model_type` key",
        "The model's config.json is missing or damaged: copy it again.",
    ),
    _rule(
        "architecture_unknown",
        r"Model architectures .{0,200}are not supported",
        "This vLLM does not know the model: deploy a newer vLLM.",
    ),
    _rule(
        "eagle3_pipeline",
        r"does not support eagle3 with pipeline parallelism",
        "Deploy with the patch set eagle3-pp, or serve on one pipeline stage.",
    ),
    _rule(
        "eagle3_interface",
        r"does not support EAGLE3 interface|Eagle3 is only supported for|aux_hidden_state_outputs was requested",
        "This vLLM cannot serve EAGLE-3 for this model as released: deploy with a patch set for this version.",
    ),
    _rule(
        "attention_block_size",
        r"No common block size for",
        "The attention of target and drafter do not fit on this backend: use a drafter with the target's attention.",
    ),
    _rule(
        "speculation_options",
        r"SpeculativeConfig|num_speculative_tokens|spec decode is not supported",
        "Correct the speculative options: this vLLM refuses them.",
    ),
    _rule(
        "max_model_len",
        r"max_model_len .{0,200}is greater than the derived",
        "Lower max-model-len to what the model's config allows.",
    ),
    _rule(
        "shape_mismatch",
        r"size mismatch|shape mismatch|shapes cannot be multiplied|must match the (?:existing )?size"
        r"|Attempted to load weight|Tried to load weights of size|shape '\[[^\]]{0,80}\]' is invalid",
        _SHAPE_REMEDY,
    ),
    _rule(
        "shape_mismatch",
        r"^AssertionError$",
        _SHAPE_REMEDY,
        frames=r"weight_loader|weight_utils|load_weights",
    ),
    _rule(
        "heads_not_divisible",
        r"must be divisible by tensor parallel size|not divisible by",
        "Choose a tensor-parallel-size that divides the model's attention heads.",
    ),
    _rule(
        "option",
        r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)"
        r"|validation errors? for \w{1,60}Args",
        "This vLLM release does not accept this option: correct it in the service's options.",
    ),
    _rule(
        "permission",
        r"PermissionError|Permission denied",
        "Let the service's user reach this path: check owner and mode of it and of every directory above.",
    ),
    _rule("disk_full", r"No space left on device|Disk quota exceeded", "Free disk space for the service's caches."),
    _rule("file_limit", r"Too many open files", "Raise LimitNOFILE of the unit."),
    _rule(
        "cpu_not_supported",
        r"Illegal instruction|status=4/ILL",
        "This CPU lacks instructions that the build needs: deploy a build for this CPU.",
    ),
    _rule(
        "compiler",
        r"Failed to find C compiler|Python\.h: No such file|InvalidCxxCompiler"
        r"|No such file or directory: '(?:gcc|g\+\+|cc)'",
        "Install a C compiler and the headers of the release's Python on the host.",
    ),
    _rule(
        "cuda_toolkit",
        r"Could not find nvcc|CUDA_HOME",
        "Install the CUDA compiler that this kernel needs, or choose an attention backend that needs none.",
    ),
    _rule(
        "library_missing",
        r"\blib(?!cu|nv|nccl)[\w.+-]{1,60}: cannot open shared object file",
        "Install the package that has this library on the host.",
    ),
    _rule(
        "shared_library",
        r"cannot open shared object file|undefined symbol",
        "The environment does not fit this host's libraries: check driver and CUDA version, then deploy anew.",
    ),
    _rule(
        "module_missing",
        r"ModuleNotFoundError|ImportError",
        "The release's environment or PYTHONPATH lacks this module: deploy the release anew.",
    ),
    _rule(
        "executable_missing",
        r"Failed at step EXEC|Failed to locate executable|status=203/EXEC",
        "The release that the unit points to is missing or incomplete: deploy it anew.",
    ),
    _rule(
        "user_missing",
        r"Failed at step USER|status=217/USER",
        "The unit's user does not exist on the host: deploy the service anew.",
    ),
    _rule(
        "namespace",
        r"Failed at step NAMESPACE|status=226/NAMESPACE",
        "A path that the unit protects or binds does not exist: create it, or correct the unit.",
    ),
    _rule(
        "replica",
        r"^\[replica\] starts again: ",
        "The parts of a replica end and start together: see the journal of the host that it names.",
    ),
    _rule(
        "killed",
        r"Failed core proc\(s\): \{(?:\}|[^}]{0,200}: -9\b)|status=9/KILL|died unexpectedly",
        "A process was killed, or ended without a word: look for the OOM killer in the kernel log (`journalctl -k`).",
    ),
    _rule(
        "crashed",
        r"Segmentation fault|status=(?:11/SEGV|6/ABRT)|Failed core proc\(s\): \{[^}]{0,200}: -(?:11|6)\b",
        "A native library crashed: `coredumpctl info` shows where.",
    ),
)

# Said by a process about another one's failure: never the cause while anything else is known.
_WRAPPER = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Frontend process failed|EngineDeadError"
    r"|EngineCore encountered an issue|^RuntimeError: (?:Executor failed|Worker failed with error|Cancelled)"
    r"|(?:Actor|Worker)(?:Died|Crashed)Error|\bRayTaskError|^(?:\w{1,40}\.){0,5}(?:SystemExit|KeyboardInterrupt"
    r"|CancelledError|GeneratorExit)\b|See (?:root cause|stack trace)"
)
_LISTED = re.compile(r"Failed core proc\(s\): \{")
_SIGNALLED = re.compile(r"Failed core proc\(s\): \{[^}]{0,200}: -\d")
# How the neighbours of a failed process see it go: on another host or GPU, or at the other end of a pipe.
_ECHO = re.compile(
    r"^(?:\w{1,40}\.){0,5}(?:ConnectionResetError|ConnectionRefusedError|DistNetworkError|DistStoreError)\b"
    r"|Connection closed by peer|got 0 bytes|remote process exited|Socket Timeout"
)
_PIPE = re.compile(r"^(?:\w{1,40}\.){0,5}(?:BrokenPipeError|EOFError|ZMQError)\b|Broken pipe")

# Lines without a level are not vLLM's: Python's own traceback, the parser of the command line, systemd.
_FATAL_LEVELS = ("", "ERROR", "CRITICAL")

# Lines that state a failure without a traceback. systemd's own lines are in the journal of the invocation.
_DECISIVE = re.compile(r"killed by the OOM killer|Out of memory: Killed process|result 'oom-kill'")
_STATED = re.compile(
    r"^[\w. -]{1,60}: error: |^Fatal Python error: |error while loading shared libraries|Failed at step \w{1,30}"
    r"|Failed to locate executable|^\s{0,4}what\(\):  |Worker proc .{1,60} died unexpectedly|^Illegal instruction"
    r"|^Segmentation fault|^\[replica\] starts again: "
)
# vLLM goes on when its native library cannot be loaded, and fails at the first use of a kernel.
_NO_KERNELS = re.compile(r"'_OpNamespace' '\w{1,40}' object has no attribute")
_NOT_LOADED = re.compile(r"Failed to import from vllm\._\w{1,40}\b.{0,10}(?:ImportError|OSError)")
_EXITED = re.compile(r"Main process exited, code=(?:killed|dumped|exited), status=(?!0/)")

_TRACEBACK = re.compile(r"^\s*(?:[|+]\s*)?(?:Exception Group )?Traceback \(most recent call last\):")
_BACKGROUND = re.compile(r"^Exception (?:in thread|ignored in)")
_CHAINED = re.compile(r"^(?:The above exception was the direct cause|During handling of the above exception)")
_EXCEPTION = re.compile(r"^(?:\w{1,80}\.){0,12}[A-Z]\w{0,80}(?:\([\w.]{1,80}\))?(?::|$)")
_VALIDATION = re.compile(r"validation errors? for \w{1,80}$")


@dataclass
class _Raised:
    """One exception of a log: its line, the files of its traceback, and how it came up."""

    line: str
    frames: str
    background: bool
    chained: bool


@dataclass
class _Stream:
    """Reading state for one process's lines."""

    frames: list[str] = field(default_factory=list)
    reading: bool = False
    background: bool = False
    chained: bool = False
    # The exception whose message may go on in the next lines.
    unfinished: _Raised | None = None
    nccl_detail: bool = False


def root_cause(lines: Iterable[str]) -> Cause | None:
    """Return why the start whose log this is failed, or None where the log states no failure.

    vLLM reports a failure several times: the worker's exception, then what the engine core and the API server say
    about it, each as a traceback of its own, often interleaved, and the last is the least useful. Taken is, in this
    order: the OOM killer's work; the first exception that is not about another process (of a chain, its last link);
    a failure stated without a traceback; what the other processes say (`_rank`); systemd's word on the exit status.
    """
    records = parse_records(lines)
    for record in records:
        if _DECISIVE.search(record.text):
            return _cause(record.text)
    raised = _exceptions(records)
    foreground = [item for item in raised if _rank(item) == _OWN]
    if foreground:
        chosen = _last_of_chain(foreground)
        if _NO_KERNELS.search(chosen.line):
            for record in records:
                if _NOT_LOADED.search(record.text):
                    return _cause(record.text)
        return _cause(chosen.line, chosen.frames)
    fatal = [record.text for record in records if record.level in _FATAL_LEVELS]
    for text in fatal:
        if _STATED.search(text):
            return _cause(text)
    if raised:
        chosen = min(raised, key=_rank)
        return _cause(chosen.line, chosen.frames)
    for text in fatal:
        if _EXITED.search(text):
            return _cause(text)
    return None


def _cause(line: str, frames: str = "") -> Cause:
    text = line.strip()
    for rule in _RULES:
        if rule.line.search(text) and (rule.frames is None or rule.frames.search(frames)):
            return Cause(text, rule.remedy, rule.kind)
    return Cause(text, "", "unknown")


# How much an exception says about the cause: its own, then the others from telling to idle.
_OWN, _BACKGROUND_THREAD, _DIED_BY_SIGNAL, _LOST_CONTACT, _LIST_OF_THE_DEAD, _LOST_PIPE, _ABOUT_OTHERS = range(7)


def _rank(item: _Raised) -> int:
    if _SIGNALLED.search(item.line):
        return _DIED_BY_SIGNAL
    # Also where the list is empty: vLLM did not learn how the process ended.
    if _LISTED.search(item.line):
        return _LIST_OF_THE_DEAD
    if _WRAPPER.search(item.line):
        return _ABOUT_OTHERS
    if _ECHO.search(item.line):
        return _LOST_CONTACT
    if _PIPE.search(item.line):
        return _LOST_PIPE
    return _BACKGROUND_THREAD if item.background else _OWN


def _last_of_chain(items: list[_Raised]) -> _Raised:
    chosen = items[0]
    for item in items[1:]:
        if not item.chained:
            break
        chosen = item
    return chosen


def _exceptions(records: list[Record]) -> list[_Raised]:
    """Find the exceptions of every traceback, process by process, in the order of their lines."""
    streams: dict[str, _Stream] = {}
    found: list[_Raised] = []
    for record in records:
        if record.level not in _FATAL_LEVELS:
            continue
        stream = streams.setdefault(record.source, _Stream())
        if raised := _advance(stream, record.text):
            found.append(raised)
    return found


def _advance(stream: _Stream, text: str) -> _Raised | None:
    if stream.unfinished is not None:
        _add_detail(stream, stream.unfinished, text)
    if _TRACEBACK.match(text):
        stream.reading = True
        stream.frames = []
        return None
    if not stream.reading:
        if _BACKGROUND.match(text):
            stream.background = True
        elif _CHAINED.match(text):
            stream.chained = True
        return None
    if text[:1].isspace() or not text:
        if text.lstrip().startswith("File "):
            stream.frames.append(text.strip())
        return None
    if not _EXCEPTION.match(text):
        # Another process wrote in between.
        return None
    raised = _Raised(text.strip(), "\n".join(stream.frames), stream.background, stream.chained)
    stream.reading = stream.background = stream.chained = False
    if _VALIDATION.search(raised.line) or "NCCL error" in raised.line:
        stream.unfinished = raised
    return raised


def _add_detail(stream: _Stream, raised: _Raised, text: str) -> None:
    """Append what a message says in later lines.

    pydantic names the model first, then on lines of their own the field, and the message indented. NCCL's own words
    follow the line `Last error:`.
    """
    if "NCCL error" in raised.line:
        if stream.nccl_detail:
            raised.line = f"{raised.line}: {text.strip()}"
        if stream.nccl_detail or _TRACEBACK.match(text):
            stream.unfinished = None
        stream.nccl_detail = text.strip() == "Last error:"
    elif text[:1].isspace():
        message = text.strip().split(" [type=", 1)[0]
        raised.line = f"{raised.line}: {message.removeprefix('Value error, ')}"
        stream.unfinished = None
    elif re.match(r"^[\w.]{1,100}$", text):
        raised.line = f"{raised.line}: {text}"
    else:
        stream.unfinished = None

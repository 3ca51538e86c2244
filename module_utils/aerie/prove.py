# SPDX-License-Identifier: Apache-2.0
"""The symbolic check: run a release's own source with symbolic tensors and see which streams reach the drafter.

The model's ``__init__`` and ``forward``, its mixin, the causal LM and the wrapper are taken from the (planned) source
and executed as they are; layers, norm, embedding and the pipeline group are stand-ins. Tap id k must be the stream
that enters layer k: the embedding for 0, the last layer's output before the norm for the number of layers. Taps must
arrive ascending, once each, whatever ids are declared. Only the standard library is needed.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from ansible.module_utils.aerie.symbolic import (
    Embedding,
    Intermediate,
    Layer,
    MissingLayer,
    Module,
    Multimodal,
    Norm,
    Opaque,
    ProofError,
    Tensor,
    all_gather,
    concatenate,
    stream,
)

Reader = Callable[[str], bytes]

_FIRST_MOE_LAYER = 3


class Case(NamedTuple):
    """One run: layers held by each pipeline stage, declared tap ids, entry point, sequence-parallel MoE or not."""

    stages: tuple[int, ...]
    ids: tuple[int, ...]
    wrapped: bool = False
    sequence_parallel: bool = False

    def __str__(self) -> str:
        through = ", through the wrapper" if self.wrapped else ""
        parallel = ", sequence-parallel MoE" if self.sequence_parallel else ""
        split = "+".join(map(str, self.stages))
        return f"pipeline size {len(self.stages)} (layers {split}), ids {self.ids}{through}{parallel}"


@dataclass
class Proof:
    """How many cases ran, and the ones that failed with what they show."""

    run: int = 0
    failures: list[tuple[Case, str]] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """Return one line for people; a failure's line names its case."""
        passed = f"{self.run - len(self.failures)} of {self.run} symbolic cases passed"
        if not self.failures:
            return passed
        case, fault = self.failures[0]
        return f"{passed}; first failure: {case}: {fault}"


def default_cases(layers: int, pipeline_sizes: Iterable[int], wrapped: bool) -> list[Case]:
    """Return the matrix for a model of ``layers`` layers: even and uneven splits, ids on and beside every boundary."""
    entries = (False, True) if wrapped else (False,)
    cases = []
    for size in pipeline_sizes:
        for stages in _splits(layers, size) if size <= layers else []:
            starts = [0, *itertools.accumulate(stages)]
            near = sorted({min(max(start + step, 0), layers) for start in starts for step in (-1, 0, 1)})
            lists = [
                (2, layers // 2, layers - 3),
                (1, layers // 2 - 1, layers - 4),
                tuple(starts),
                tuple(near),
                (layers, starts[-2], 0),
                (near[-2], 2, near[-2], 0, 2),
                (starts[1],),
                tuple(range(layers + 1)),
            ]
            inside = dict.fromkeys(tuple(tap for tap in ids if 0 <= tap <= layers) for ids in lists)
            for parallel in (False, True) if size == 1 else (False,):
                cases += [Case(stages, ids, entry, parallel) for ids in inside for entry in entries]
    return cases


def _splits(layers: int, size: int) -> list[tuple[int, ...]]:
    """Return an even split (the remainder as vLLM gives it: not to the last stage), and two uneven ones."""
    base, rest = divmod(layers, size)
    if size == 1:
        return [(layers,)]
    even = [base + (1 if size - 1 - rest <= stage < size - 1 else 0) for stage in range(size)]
    first_small = [1, *[(layers - 1) // (size - 1)] * (size - 1)]
    last_small = [*[(layers - 1) // (size - 1)] * (size - 1), 1]
    splits = []
    for split, where in ((even, -1), (first_small, -1), (last_small, 0)):
        split[where] += layers - sum(split)
        splits.append(tuple(split))
    return list(dict.fromkeys(splits))


def prove(read: Reader, proof: Mapping[str, Any], cases: Sequence[Case]) -> Proof:
    """Run ``cases`` on the source that ``read`` gives for a path in the package; ``proof`` is that of a patch set."""
    result = Proof()
    try:
        release = _Release(read, proof)
    except ProofError as error:
        return Proof(len(cases), [(case, str(error)) for case in cases])
    except Exception as error:
        fault = f"the source raises {type(error).__name__}: {error}"
        return Proof(len(cases), [(case, fault) for case in cases])
    for case in cases:
        result.run += 1
        try:
            _check_case(release, case)
        except ProofError as error:
            result.failures.append((case, str(error)))
    return result


def _check_case(release: _Release, case: Case) -> None:
    run = _Run(case)
    try:
        tops = [release.build(run, rank) for rank in range(len(case.stages))]
        hidden, taps = _pass_through(release, run, tops)
    except ProofError:
        raise
    except Exception as error:
        raise ProofError(f"the source raises {type(error).__name__}: {error}") from error
    expected = [stream(tap) for tap in sorted(set(case.ids))]
    got = [tap.describe() for tap in taps]
    if got != expected:
        raise ProofError(f"{_fault(expected, got)} (expected {expected}, got {got})")
    if hidden.describe() != "norm":
        raise ProofError(f"the model returns {hidden.describe()} instead of the normed stream")


def _pass_through(release: _Release, run: _Run, tops: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """Run every stage as the runner does: send, relay, receive; return what the last one gives the drafter."""
    received: Intermediate | None = None
    positions = Tensor("positions")
    for rank, top in enumerate(tops):
        run.rank = rank
        inner = release.names["_inner_decoder"](top)
        if run.size > 1:
            release.names["verify_supports_aux_hidden_states_over_pp"](top, "eagle3")
        if received is not None:
            _check_slots(inner, received, rank)
        output = top.forward(Tensor("token ids"), positions, received)
        if rank == run.size - 1:
            break
        if not isinstance(output, Intermediate):
            raise ProofError(f"stage {rank} returns no IntermediateTensors")
        relayed = {key: received[key] for key in release.names["aux_hidden_state_relay_keys"](top)} if received else {}
        received = Intermediate({key: tensor.copy() for key, tensor in {**relayed, **output.tensors}.items()})
    hidden, taps = output if isinstance(output, tuple) else (output, [])
    if not isinstance(hidden, Tensor):
        raise ProofError(f"the last stage returns {type(hidden).__name__} instead of a tensor")
    for tap in taps:
        if not isinstance(tap, Tensor):
            raise ProofError(f"a tap is {tap} instead of a tensor")
    return hidden, list(taps)


def _check_slots(inner: Any, received: Intermediate, rank: int) -> None:  # noqa: ANN401 - built from foreign source
    """The receiving stage has reserved buffers by count: what arrives must be exactly those."""
    key = inner.AUX_HIDDEN_STATE_KEY
    wanted = {f"{key}{slot}" for slot in range(inner._aux_slot_base_cached)}
    sent = set(received.tensors) - {"hidden_states", "residual"}
    if sent != wanted:
        raise ProofError(
            f"stage {rank} expects {len(wanted)} taps from upstream, it is sent {len(sent)} "
            f"(missing {sorted(wanted - sent)}, unexpected {sorted(sent - wanted)})"
        )


def _fault(expected: list[str], got: list[str]) -> str:
    """Name what is wrong with the taps, in the words a reader would use."""
    lost = [name for name in expected if name not in got]
    double = sorted({name for name in got if got.count(name) > 1})
    foreign = [name for name in got if name not in expected]
    faults = []
    if foreign:
        faults.append(f"wrong tap {', '.join(foreign)}")
    if lost:
        faults.append(f"lost tap {', '.join(lost)}")
    if double:
        faults.append(f"captured twice: {', '.join(double)}")
    return "; ".join(faults) or "wrong order"


class _Run:
    """One case being run: which stage's turn it is. It is also the pipeline group that the source sees."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.size = self.world_size = len(case.stages)
        self.rank = 0

    @property
    def is_first_rank(self) -> bool:
        return self.rank == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.size - 1

    def layers(self) -> tuple[int, int, list[Module]]:
        """Return (first layer, one past the last, all layers) as vLLM's make_layers does for this stage."""
        start = sum(self.case.stages[: self.rank])
        end = start + self.case.stages[self.rank]
        sequence_parallel = self.case.sequence_parallel
        return (
            start,
            end,
            [
                Layer(index, sequence_parallel and index >= _FIRST_MOE_LAYER)
                if start <= index < end
                else MissingLayer()
                for index in range(sum(self.case.stages))
            ],
        )


class _Release:
    """The classes and functions of one release, executed from its source over stand-ins."""

    def __init__(self, read: Reader, proof: Mapping[str, Any]) -> None:
        self.run: _Run | None = None
        self.proof = proof
        self.names: dict[str, Any] = self._stand_ins()
        wanted: dict[str, list[str]] = {}
        for source in proof["sources"]:
            wanted.setdefault(source["path"], []).extend(source["names"])
        for role in ("model", "causal_lm", "wrapper"):
            if role in proof:
                wanted.setdefault(proof[role]["path"], []).append(proof[role]["class"])
        for path, names in wanted.items():
            self._execute(path, read(path), names)

    def _stand_ins(self) -> dict[str, Any]:
        def group() -> _Run | None:
            return self.run

        def make_layers(*_args: object, **_options: object) -> tuple[int, int, list[Module]]:
            assert self.run is not None
            return self.run.layers()

        return {
            "nn": SimpleNamespace(Module=Module),
            "SupportsMultiModal": Multimodal,
            "torch": SimpleNamespace(cat=concatenate),
            "islice": itertools.islice,
            "bisect_right": bisect_right,
            "get_pp_group": group,
            "model_parallel_is_initialized": lambda: True,
            "make_layers": make_layers,
            "tensor_model_parallel_all_gather": all_gather,
            "IntermediateTensors": Intermediate,
            "PPMissingLayer": MissingLayer,
            "VocabParallelEmbedding": lambda *_args, **_options: Embedding(),
            "RMSNorm": lambda *_args, **_options: Norm(),
        }

    def _execute(self, path: str, data: bytes, names: Sequence[str]) -> None:
        tree = ast.parse(data)
        body: list[ast.stmt] = []
        for name in names:
            found = [
                node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
            ]
            if not found:
                raise ProofError(f"{path} has no {name}")
            # Overloads come first; the last definition is the one that runs.
            last = found[-1]
            body.append(self._bare_class(last, path) if isinstance(last, ast.ClassDef) else _bare_function(last))
        future = ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")], level=0)
        module = ast.fix_missing_locations(ast.Module(body=[future, *body], type_ignores=[]))
        for node in ast.walk(module):
            if isinstance(node, ast.Name) and node.id not in self.names and not hasattr(builtins, node.id):
                self.names[node.id] = Opaque(node.id)
        exec(compile(module, path, "exec", dont_inherit=True), self.names)

    def _bare_class(self, node: ast.ClassDef, path: str) -> ast.ClassDef:
        """Return the class without decorators, unknown bases, and class attributes that are not plain values."""
        bases = [base for base in node.bases if self._is_known(base)]
        body: list[ast.stmt] = []
        for child in node.body:
            if isinstance(child, ast.FunctionDef):
                skipped = child.name == "__init__" and node.name != self.proof["model"]["class"]
                body += [] if skipped or child.decorator_list else [_bare_function(child)]
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and _is_plain(child.value):
                body.append(child)
        if not body:
            raise ProofError(f"{path}: class {node.name} has nothing to run")
        return ast.ClassDef(name=node.name, bases=bases, keywords=[], body=body, decorator_list=[])

    def _is_known(self, base: ast.expr) -> bool:
        module, _, name = ast.unparse(base).rpartition(".")
        value = getattr(self.names.get(module), name, None) if module else self.names.get(name)
        return isinstance(value, type)

    def build(self, run: _Run, rank: int) -> Any:  # noqa: ANN401 - an object of foreign source
        """Build stage ``rank``, declare the taps through the top-level model, and return that model."""
        self.run = run
        run.rank = rank
        inner = self.names[self.proof["model"]["class"]](vllm_config=_vllm_config(run), prefix="model")
        _check_embedding(inner, run)
        inner.norm.expected = stream(sum(run.case.stages))
        top = self.names[self.proof["causal_lm"]["class"]].__new__(self.names[self.proof["causal_lm"]["class"]])
        if self.proof["causal_lm"].get("shared"):
            _check_shared_setter(top)
        top.model = inner
        if run.case.wrapped:
            causal_lm = top
            top = self.names[self.proof["wrapper"]["class"]].__new__(self.names[self.proof["wrapper"]["class"]])
            top.language_model = causal_lm
        top.set_aux_hidden_state_layers(run.case.ids)
        return top


def _check_embedding(inner: Any, run: _Run) -> None:  # noqa: ANN401
    """The first stage embeds the tokens, the last one embeds the drafter's; the others must not hold the table."""
    holds = isinstance(inner.embed_tokens, Embedding)
    if holds != (run.is_first_rank or run.is_last_rank):
        verb = "builds no" if not holds else "needlessly builds the"
        raise ProofError(f"stage {run.rank} of {run.size} {verb} input embedding")


def _check_shared_setter(top: Any) -> None:  # noqa: ANN401
    """The causal LM class also serves models with an inner model of their own, which read the plain attribute."""
    top.model = SimpleNamespace()
    top.set_aux_hidden_state_layers((2, 1))
    if set(getattr(top.model, "aux_hidden_state_layers", ())) != {1, 2}:
        raise ProofError(
            f"{type(top).__name__} no longer sets the taps of an inner model that is not an EagleModelMixin"
        )


def _vllm_config(run: _Run) -> Any:  # noqa: ANN401
    """The part of VllmConfig that decides something: a DeepSeek-V3 text model with an EAGLE-3 drafter."""
    hf_config = SimpleNamespace(
        model_type="deepseek_v3",
        hidden_size=7168,
        vocab_size=163840,
        num_hidden_layers=sum(run.case.stages),
        rms_norm_eps=1e-6,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        kv_lora_rank=512,
        v_head_dim=128,
        n_routed_experts=384,
        first_k_dense_replace=_FIRST_MOE_LAYER,
    )
    config = Opaque("vllm_config")
    config.__dict__["model_config"] = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config)
    config.__dict__["speculative_config"] = SimpleNamespace(method="eagle3")
    return config


class _WithoutImports(ast.NodeTransformer):
    """Drops the imports inside a function: what they bring is a stand-in already."""

    def visit_Import(self, _node: ast.Import) -> ast.AST:
        return ast.Pass()

    def visit_ImportFrom(self, _node: ast.ImportFrom) -> ast.AST:
        return ast.Pass()


def _bare_function(node: ast.FunctionDef) -> ast.FunctionDef:
    bare: ast.FunctionDef = _WithoutImports().visit(node)
    bare.decorator_list = []
    return bare


def _is_plain(value: ast.expr | None) -> bool:
    try:
        ast.literal_eval(value or "")
    except (ValueError, SyntaxError):
        return False
    return value is not None

# SPDX-License-Identifier: Apache-2.0
"""The symbolic check: run a release's own source with symbolic tensors and see which streams reach the drafter.

The model's ``__init__`` and ``forward``, its mixin, the causal LM and the wrapper are taken from the (planned) source
and executed as they are; layers, norm, embedding and the pipeline group are stand-ins. Tap id k must be the stream
that enters layer k: the embedding for 0, the last layer's output before the norm for the number of layers. Taps must
arrive ascending, once each, whatever ids are declared. Only the standard library is needed.

What is run is named by a mapping (a patch set's ``proof``); ``path`` is a file of the package:

``model``, ``causal_lm``   ``path`` and ``class``; ``causal_lm`` with ``shared`` also serves other inner models
``wrapper``                the same, of the multimodal model; its source says if it holds a causal LM or the bare model
``interface``              the class that the runner asks the top-level model for
``sources``                ``path`` and ``names`` of more classes and functions that the above use; with ``optional``
                           those that the release has
``pipeline_sizes``         the numbers of stages to run
``allow_list``, ``loader``   gates before the model, see ``gates``
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

from ansible.module_utils.aerie.gates import check_allow_list, check_loader
from ansible.module_utils.aerie.source import matches, parse_shape, statements
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
# How runners ask for the default taps: before vLLM 0.18, and since.
_DEFAULT_TAP_HOOKS = ("get_eagle3_aux_hidden_state_layers", "get_eagle3_default_aux_hidden_state_layers")


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


class Gate(NamedTuple):
    """One run of what stands before the model."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass
class Proof:
    """How many cases ran, and the ones that failed with what they show."""

    run: int = 0
    failures: list[tuple[Case | Gate, str]] = field(default_factory=list)

    @property
    def fails_only_over_stages(self) -> bool:
        """Tell whether all that failed are cases of several pipeline stages."""
        return all(isinstance(case, Case) and len(case.stages) > 1 for case, _ in self.failures)

    @property
    def summary(self) -> str:
        """Return one line for people; a failure's line names its case."""
        passed = f"{self.run - len(self.failures)} of {self.run} symbolic cases passed"
        if not self.failures:
            return passed
        case, fault = self.failures[0]
        return f"{passed}; first failure: {case}: {fault}"


def default_cases(
    layers: int, pipeline_sizes: Iterable[int], wrapped: bool, sequence_parallel: bool = True
) -> list[Case]:
    """Return the matrix for a model of ``layers`` layers: even and uneven splits, ids on and beside every boundary.

    ``sequence_parallel``: whether the release's layers can hand on shards of the rows.
    """
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
            for parallel in (False, True) if size == 1 and sequence_parallel else (False,):
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


def prove(read: Reader, proof: Mapping[str, Any], cases: Sequence[Case], *, stop_early: bool = False) -> Proof:
    """Run ``cases`` on the source that ``read`` gives for a path in the package; ``proof`` says what that source is.

    With ``stop_early`` nothing runs after the first failure.
    """
    result = Proof()
    try:
        release = _Release(read, proof)
    except Exception as error:
        return Proof(len(cases), [(case, _fault_of(error)) for case in cases])
    checks: list[tuple[Case | Gate, Callable[[], None]]] = [
        *((Gate(name), check) for name, check in _gates(release, read)),
        *((case, lambda case=case: _check_case(release, case)) for case in cases),
    ]
    for name, check in checks:
        result.run += 1
        try:
            check()
        except Exception as error:
            result.failures.append((name, _fault_of(error)))
            if stop_early:
                break
    return result


def _fault_of(error: Exception) -> str:
    return str(error) if isinstance(error, ProofError) else f"the source raises {type(error).__name__}: {error}"


def _gates(release: _Release, read: Reader) -> Iterable[tuple[str, Callable[[], None]]]:
    proof = release.proof
    if "allow_list" in proof:
        path, model_types = proof["allow_list"]["path"], proof["allow_list"]["model_types"]
        yield "the list of models that EAGLE-3 is allowed for", lambda: check_allow_list(path, read(path), model_types)
    if "loader" in proof and "wrapper" in proof:
        yield "the drafter's loader with the wrapper as its target", lambda: _check_loader(release, read)


def _check_loader(release: _Release, read: Reader) -> None:
    path = release.proof["loader"]["path"]
    top = release.build(_Run(Case((_FIRST_MOE_LAYER,), (1,), wrapped=True)), 0)
    head = object()
    (top if release.wraps_bare_model else top.language_model).lm_head = head
    inner = top.language_model if release.wraps_bare_model else top.language_model.model
    check_loader(path, read(path), top, inner.embed_tokens, head)


def _check_case(release: _Release, case: Case) -> None:
    run = _Run(case)
    tops = [release.build(run, rank) for rank in range(len(case.stages))]
    hidden, taps = _pass_through(release, run, tops)
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
        if run.size > 1:
            release.names["verify_supports_aux_hidden_states_over_pp"](top, "eagle3")
        if received is not None:
            _check_slots(release.names["_inner_decoder"](top), received, rank)
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
        self.wraps_bare_model = False
        wanted: dict[str, dict[str, bool]] = {}
        for source in proof["sources"]:
            names = dict.fromkeys(source["names"], bool(source.get("optional")))
            wanted.setdefault(source["path"], {}).update(names)
        for role in ("interface", "model", "causal_lm", "wrapper"):
            if role in proof:
                wanted.setdefault(proof[role]["path"], {})[proof[role]["class"]] = False
        for path, optional in wanted.items():
            self._execute(path, read(path), optional)

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

    def _execute(self, path: str, data: bytes, names: Mapping[str, bool]) -> None:
        """Define ``names`` as the source at ``path`` does; those that map to True may be missing."""
        tree = ast.parse(data)
        body: list[ast.stmt] = []
        for name in names:
            found = [
                node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name
            ]
            if not found and names[name]:
                continue
            if not found:
                raise ProofError(f"{path} has no {name}")
            # Overloads come first; the last definition is the one that runs.
            last = found[-1]
            if name == self.proof.get("wrapper", {}).get("class"):
                holds_model = parse_shape(f"self.language_model = {self.proof['model']['class']}(...)")
                self.wraps_bare_model = any(matches(holds_model, node) for node in statements(last))
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
        top = inner if run.case.wrapped and self.wraps_bare_model else self._around("causal_lm", model=inner)
        if run.case.wrapped:
            top = self._around("wrapper", language_model=top)
        self._check_interface(top, sum(run.case.stages))
        top.set_aux_hidden_state_layers(run.case.ids)
        return top

    def _around(self, role: str, **held: Any) -> Any:  # noqa: ANN401
        """Return an object of the class in ``role`` that holds what its ``__init__`` would build."""
        kind = self.names[self.proof[role]["class"]]
        outer = kind.__new__(kind)
        if self.proof[role].get("shared"):
            _check_shared_setter(outer)
        outer.__dict__.update(held)
        return outer

    def _check_interface(self, top: Any, layers: int) -> None:  # noqa: ANN401
        """The runner asks the top-level model for the interface, and for the taps when the drafter declares none."""
        if "interface" not in self.proof:
            return
        interface = self.names[self.proof["interface"]["class"]]
        name = type(top).__name__
        if not isinstance(top, interface):
            raise ProofError(f"{name} does not declare {interface.__name__}: the runner refuses it")
        (hook,) = [one for one in _DEFAULT_TAP_HOOKS if one in vars(interface)]
        taps = getattr(top, hook)()
        if taps != (2, layers // 2, layers - 3):
            raise ProofError(f"{name}.{hook} gives {taps} instead of {(2, layers // 2, layers - 3)}")


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

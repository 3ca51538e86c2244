# SPDX-License-Identifier: Apache-2.0
"""Symbolic tensors, and stand-ins for the layers of a model, for the symbolic check (``prove``).

Stream k is what enters layer k: hidden states plus residual. Layers, the final norm and the embedding know which stream
they must get, give the next one, and overwrite what they got, as the fused kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TOKENS = 10
TENSOR_PARALLEL = 4


class ProofError(Exception):
    """A case in which the source does something else than it must; the text names the fault."""


def stream(layer: int) -> str:
    """Name the stream that enters layer ``layer``; the number of layers is the last one's output."""
    return f"stream {layer}"


class Tensor:
    """A symbolic tensor: which value it holds, how many rows, and whether a kernel has overwritten it since.

    A layer and the norm update their inputs in place, as the fused kernels do.
    """

    def __init__(self, value: str, rows: int = TOKENS, parts: tuple[Tensor, ...] = ()) -> None:
        self.value = value
        self.rows = rows
        self.parts = parts

    @property
    def shape(self) -> tuple[int, str]:
        return (self.rows, "width")

    def describe(self) -> str:
        """Return the stream's name, with what is wrong with it."""
        names = {"hidden 0": stream(0)}
        text = names.get(self.value, self.value)
        return text if self.rows == TOKENS else f"{text} (a sequence-parallel shard of {self.rows} of {TOKENS} rows)"

    def copy(self) -> Tensor:
        return Tensor(self.value, self.rows, tuple(part.copy() for part in self.parts))

    clone = contiguous = copy

    def overwrite(self, by: str) -> None:
        self.value = f"{self.value} overwritten by {by}"

    def __add__(self, other: Any) -> Tensor:  # noqa: ANN401 - foreign source may add anything
        if not isinstance(other, Tensor):
            raise ProofError(f"{self.describe()} is added to {type(other).__name__}")
        values = sorted([self.value, other.value])
        layer = values[0].rpartition(" ")[2]
        if values == [f"hidden {layer}", f"residual {layer}"] and self.rows == other.rows:
            return Tensor(stream(int(layer)), self.rows)
        return Tensor(f"{self.describe()} + {other.describe()}", self.rows)

    def __getitem__(self, key: Any) -> Tensor:  # noqa: ANN401
        if not isinstance(key, slice) or key.start is not None or key.step is not None:
            raise ProofError(f"the symbolic check knows no index {key!r} of a tensor")
        return Tensor(self.value, min(self.rows, key.stop), self.parts)

    def split(self, sizes: list[Any], dim: int) -> list[Tensor]:
        if dim != -1 or len(sizes) != len(self.parts):
            raise ProofError("a tensor is split otherwise than it was concatenated")
        return [Tensor(part.value, self.rows) for part in self.parts]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise ProofError(f"the symbolic check does not know tensor.{name}")


def concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    if dim != -1:
        raise ProofError("tensors are concatenated along their rows")
    return Tensor(" | ".join(tensor.value for tensor in tensors), tensors[0].rows, tuple(tensors))


def all_gather(tensor: Tensor, dim: int) -> Tensor:
    if dim != 0:
        raise ProofError("an all-gather that is not along the rows")
    return Tensor(tensor.value, tensor.rows * TENSOR_PARALLEL, tensor.parts)


class Intermediate:
    """Stands for IntermediateTensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


class Module:
    """Stands for torch.nn.Module."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        return self.forward(*args, **options)  # type: ignore[attr-defined]


class MissingLayer(Module):
    """Stands for PPMissingLayer."""

    def forward(self, *_args: object, **_options: object) -> None:
        raise ProofError("a layer of another stage is called")


class Embedding(Module):
    def forward(self, _token_ids: Tensor) -> Tensor:
        return Tensor("hidden 0")


class Norm(Module):
    """The final norm; it stands for any RMSNorm, and only the model's last one is called."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = (hidden + residual).describe() if residual is not None else hidden.describe()
        if before != self.expected:
            raise ProofError(f"the norm gets {before} instead of {self.expected}")
        hidden.overwrite("the norm")
        residual.overwrite("the norm")  # type: ignore[union-attr]
        return Tensor("norm"), Tensor("residual of the norm")

    expected = ""


class Layer(Module):
    """Layer ``index``: wants the stream that enters it, gives the next one, overwrites what it got."""

    def __init__(self, index: int, sequence_parallel: bool) -> None:
        self.index = index
        self.use_sequence_parallel_moe = sequence_parallel

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None, *_more: object
    ) -> tuple[Tensor, Tensor]:
        got = hidden.value if residual is None else f"{hidden.value}, {residual.value}"
        wanted = "hidden 0" if self.index == 0 else f"hidden {self.index}, residual {self.index}"
        if got != wanted or positions.value != "positions":
            raise ProofError(f"layer {self.index} gets {got} instead of {wanted}")
        if residual is not None and hidden.rows != residual.rows:
            raise ProofError(
                f"layer {self.index} gets {hidden.rows} rows of hidden states and {residual.rows} of residual"
            )
        if hidden.rows != TOKENS and not self.use_sequence_parallel_moe:
            raise ProofError(f"layer {self.index} gets a sequence-parallel shard")
        rows = -(-TOKENS // TENSOR_PARALLEL) if self.use_sequence_parallel_moe else TOKENS
        hidden.overwrite(f"layer {self.index}")
        if residual is not None:
            residual.overwrite(f"layer {self.index}")
        return Tensor(f"hidden {self.index + 1}", rows), Tensor(f"residual {self.index + 1}", rows)


class Opaque:
    """A value that the check does not model: it may be passed around, and nothing may be decided by it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Opaque:
        if name.startswith("__"):
            raise AttributeError(name)
        return Opaque(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_options: object) -> Opaque:
        return Opaque(f"{self._name}()")

    def __str__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        raise ProofError(f"the symbolic check cannot decide by {self._name}")

    def __iter__(self) -> Iterator[Any]:
        raise ProofError(f"the symbolic check cannot iterate over {self._name}")


class Multimodal:
    """Stands for SupportsMultiModal, of which only this is used."""

    def get_language_model(self) -> Any:  # noqa: ANN401
        return self.language_model  # type: ignore[attr-defined]

# SPDX-License-Identifier: Apache-2.0
"""What an installed vLLM is, read from its files alone: nothing is imported, so a broken environment answers too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.condition import edits_in
from ansible.module_utils.aerie.files import sha256_bytes, sha256_file
from ansible.module_utils.aerie.source import MARKER, Refusal, classes, functions
from ansible.module_utils.aerie.wheel import Package, package_of_directory

NATIVE, PATCHED, MISSING, UNKNOWN = "native", "patched", "missing", "unknown"

_MODELS = "model_executor/models"
_DEEPSEEK = f"{_MODELS}/deepseek_v2.py"
_KIMI = f"{_MODELS}/kimi_k25.py"
CAPABILITY_FILES = (_DEEPSEEK, _KIMI)
_TAP_IDS = "aux_hidden_state_layers"
_OVER_STAGES = "supports_aux_hidden_states_over_pp"
_MIXIN = "EagleModelMixin"
# Compiled libraries are hundreds of megabytes; everything that a patch or an editor touches is below this.
_LARGE = 1 << 20


@dataclass(frozen=True)
class Evidence:
    """One thing that a capability needs: its state, and where in the package that is seen."""

    state: str
    file: str
    line: int
    what: str


def find_package(environment: Path) -> Path:
    """Return the ``vllm`` package of the Python environment at ``environment``; refuse none and several."""
    found = {path.resolve() for path in environment.glob("lib*/python3*/site-packages/vllm") if path.is_dir()}
    if len(found) == 1:
        return found.pop()
    if found:
        names = ", ".join(sorted(map(str, found)))
        raise Refusal(f"{environment} has several vLLM packages: {names}; name one as package_dir")
    if not environment.is_dir():
        raise Refusal(f"{environment} is no directory: name the environment that vLLM is installed in")
    editable = sorted(environment.glob("lib*/python3*/site-packages/vllm*.dist-info/direct_url.json"))
    if editable:
        raise Refusal(
            f"{editable[0].parent} is an editable install, whose code is elsewhere and has no hashes: install the "
            "released wheel, or let Aerie make the environment"
        )
    raise Refusal(
        f"{environment} has no lib/python3*/site-packages/vllm: name the environment that vLLM is installed in"
    )


def describe(package_dir: Path, *, full: bool) -> dict[str, Any]:
    """Return the facts about the package at ``package_dir``; ``full`` also hashes its compiled libraries.

    What cannot be found out is empty, and said in ``problems``.
    """
    package, problems = _package(package_dir)
    torch = _torch(package_dir.parent)
    differing = _differing(package, package_dir, full=full) if package else []
    return {
        "package_dir": str(package_dir),
        "distribution": package.distribution if package else "",
        "vllm_version": package.version if package else _version_without_record(package_dir),
        "build": _build(package, package_dir),
        "torch_version": torch.get("__version__") or "",
        "torch_cuda": torch.get("cuda") or "",
        "capabilities": capabilities(lambda path: (package_dir / path).read_bytes()),
        "differing": differing,
        "problems": problems,
    }


def _package(package_dir: Path) -> tuple[Package | None, list[str]]:
    try:
        return package_of_directory(package_dir), []
    except Refusal as refusal:
        return None, [str(refusal)]
    except (OSError, ValueError) as error:
        return None, [f"the distribution of {package_dir} cannot be read ({error}): install vLLM again"]


def _version_without_record(package_dir: Path) -> str:
    """Return the version that the package itself states; "" if it does not."""
    stated = _literals(package_dir / "_version.py")
    return str(stated.get("__version__") or stated.get("version") or "")


def _torch(site_packages: Path) -> Mapping[str, Any]:
    """Return what torch says of itself: ``__version__``, and ``cuda`` (None for a CPU build)."""
    stated = _literals(site_packages / "torch" / "version.py")
    if "__version__" in stated:
        return stated
    installed = sorted(site_packages.glob("torch-*.dist-info"))
    return {"__version__": installed[0].name[len("torch-") : -len(".dist-info")]} if installed else {}


def _literals(path: Path) -> dict[str, Any]:
    """Return the names to which a Python file assigns plain values; none where it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    values = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            values.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return values


def _build(package: Package | None, package_dir: Path) -> str:
    """Return ``cuda``, ``rocm``, ``xpu`` or ``cpu`` as the name, the version or the compiled parts say it; else ""."""
    stated = f"{package.distribution} {package.version}" if package else _version_without_record(package_dir)
    named = re.search(r"\b(cpu|rocm|xpu|cu(?=\d))", stated)
    if named:
        return "cuda" if named.group() == "cu" else named.group()
    files = package.recorded if package else [path.name for path in package_dir.glob("*.so")]
    compiled = {name.partition(".")[0] for name in files if name.endswith(".so")}
    if "_rocm_C" in compiled:
        return "rocm"
    if compiled & {"cumem_allocator", "_moe_C", "_moe_C_stable_libtorch"}:
        return "cuda"
    return "cpu" if "_C" in compiled else ""


def _differing(package: Package, package_dir: Path, *, full: bool) -> list[dict[str, Any]]:
    """Return the files that are not what RECORD names, by hashing them; those with Aerie's marks count as patched."""
    hashed = (
        (path, recorded, _digest(package_dir / path, full=full))
        for path, recorded in sorted(package.recorded.items())
        if recorded
    )
    return [_difference(package_dir, path, digest) for path, recorded, digest in hashed if digest not in ("", recorded)]


def _digest(path: Path, *, full: bool) -> str | None:
    """Return the sha256 of a file, "" for a large one that is not to be read, None for one that cannot be read."""
    try:
        if path.stat().st_size > _LARGE:
            return sha256_file(path) if full else ""
        # In one piece: there are thousands of them.
        return sha256_bytes(path.read_bytes())
    except OSError:
        return None


def _difference(package_dir: Path, path: str, digest: str | None) -> dict[str, Any]:
    edits = edits_in((package_dir / path).read_bytes()) if digest and path.endswith(".py") else []
    state = MISSING if digest is None else PATCHED if edits else "changed"
    return {"path": path, "state": state, "sha256": digest or "", "edits": edits}


def capabilities(read: Callable[[str], bytes]) -> dict[str, dict[str, Any]]:
    """Return what the code that ``read`` gives can do with EAGLE-3 for DeepSeek-V3 and Kimi-K2.5.

    ``interface``  the models declare the interface, so that the runner accepts a drafter
    ``taps``       every tap id from 0 to the number of layers reaches the drafter
    ``pipeline``   taps travel over pipeline stages

    Each has its ``state`` (that of what is least there) and the ``evidence``.
    """
    deepseek, kimi = _Code(read, _DEEPSEEK), _Code(read, _KIMI)
    found = {
        "interface": [
            *_interface(deepseek, "DeepseekV2ForCausalLM"),
            *_interface(kimi, "KimiK25ForConditionalGeneration"),
        ],
        "taps": list(_taps(deepseek)),
        "pipeline": list(_pipeline(deepseek)),
    }
    return {
        name: {"state": _worst(evidence), "evidence": [asdict(one) for one in evidence]}
        for name, evidence in found.items()
    }


def _worst(evidence: Sequence[Evidence]) -> str:
    states = {one.state for one in evidence}
    return next((state for state in (MISSING, UNKNOWN, PATCHED, NATIVE) if state in states), MISSING)


class _Code:
    """One file of the package: its tree (None without one, and why), and which lines carry Aerie's mark."""

    def __init__(self, read: Callable[[str], bytes], path: str) -> None:
        self.path = f"vllm/{path}"
        self.tree: ast.Module | None = None
        self.lines: list[bytes] = []
        self.state, self.why = UNKNOWN, ""
        try:
            data = read(path)
            self.tree = ast.parse(data)
            self.lines = data.splitlines()
        except (OSError, KeyError, Refusal):
            self.state, self.why = MISSING, "is not there"
        except (SyntaxError, ValueError) as error:
            self.why = f"cannot be parsed by this Python: {error}"

    def missing(self, what: str, node: ast.AST | None = None) -> Evidence:
        return Evidence(MISSING, self.path, getattr(node, "lineno", 0), what)

    def there(self, what: str, node: ast.AST) -> Evidence:
        line = getattr(node, "lineno", 0)
        marked = line and MARKER.encode() in self.lines[line - 1]
        return Evidence(PATCHED if marked else NATIVE, self.path, line, what)

    def unreadable(self) -> Evidence:
        return Evidence(self.state, self.path, 0, f"{self.path} {self.why}")

    def class_(self, name: str) -> ast.ClassDef | None:
        found = classes(self.tree, name) if self.tree else []
        return found[-1] if found else None


def _interface(code: _Code, name: str) -> Iterator[Evidence]:
    owner = code.class_(name)
    if owner is None:
        # A release without Kimi-K2.5 lacks the model, not the interface.
        if code.tree or code.path != f"vllm/{_KIMI}" or code.state == UNKNOWN:
            yield code.unreadable() if code.why else code.missing(f"there is no class {name}")
        return
    bases = [base for base in owner.bases if ast.unparse(base) == "SupportsEagle3"]
    if bases:
        yield code.there(f"{name} has the base SupportsEagle3", bases[0])
    else:
        yield code.missing(f"{name} has no base SupportsEagle3", owner)


def _taps(code: _Code) -> Iterator[Evidence]:
    owner = code.class_("DeepseekV2Model")
    forward = functions(owner, "forward")[-1:] if owner else []
    if not forward:
        yield code.unreadable() if code.why else code.missing("there is no DeepseekV2Model.forward")
        return
    loops = [node for node in ast.walk(forward[0]) if isinstance(node, ast.For)]
    captures = [node for node in ast.walk(forward[0]) if isinstance(node, ast.If) and _mentions(node.test, _TAP_IDS)]
    inside = [node for node in captures if any(_within(node, loop) for loop in loops)]
    if not inside:
        yield code.missing("DeepseekV2Model.forward captures no hidden state", forward[0])
        return
    loop = next(loop for loop in loops if _within(inside[0], loop))
    yield code.there("a tap is captured at a layer's input", inside[0].test)
    after = [node for node in captures if node.lineno > (loop.end_lineno or loop.lineno)]
    if after:
        yield code.there("the last layer's output (id num_layers) is captured", after[0].test)
    else:
        yield code.missing("the last layer's output (id num_layers) is never captured", loop)
    before: list[ast.AST] = [node.test for node in captures if node.lineno < loop.lineno]
    first = before or [node for capture in inside for node in ast.walk(capture) if _tests_residual(node)]
    if first:
        yield code.there("the embedding (id 0), which has no residual, is captured", first[0])
    else:
        yield code.missing("id 0 fails: the embedding has no residual to add", inside[0])


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(child, ast.Attribute) and child.attr == name for child in ast.walk(node))


def _within(node: ast.stmt, loop: ast.For) -> bool:
    return loop.lineno < node.lineno <= (loop.end_lineno or loop.lineno)


def _tests_residual(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Name)
        and node.left.id == "residual"
        and isinstance(node.ops[0], (ast.Is, ast.IsNot))
    )


def _pipeline(code: _Code) -> Iterator[Evidence]:
    owner = code.class_("DeepseekV2Model")
    if owner is None:
        yield code.unreadable() if code.why else code.missing("there is no class DeepseekV2Model")
        return
    for node in owner.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        named = any(isinstance(target, ast.Name) and target.id == _OVER_STAGES for target in targets)
        if named and isinstance(value, ast.Constant) and value.value is True:
            yield code.there(f"DeepseekV2Model sets {_OVER_STAGES}", node)
            bases = [base for base in owner.bases if ast.unparse(base) == _MIXIN]
            if bases:
                yield code.there(f"DeepseekV2Model has the base {_MIXIN}", bases[0])
            else:
                yield code.missing(f"DeepseekV2Model has no base {_MIXIN}: the flag alone carries no taps", owner)
            return
    yield code.missing(f"DeepseekV2Model does not set {_OVER_STAGES}", owner)

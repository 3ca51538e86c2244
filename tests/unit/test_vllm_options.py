# SPDX-License-Identifier: Apache-2.0
"""Which options a release takes, read from sources in the shapes of vLLM's."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest
from ansible.module_utils.aerie.source import Refusal
from ansible.module_utils.aerie.vllm_options import check_options, options_of
from ansible.module_utils.aerie.wheel import package_of_wheel

ENGINE = """
@dataclass
class EngineArgs:
    model: str = "x"
    speculative_config: dict | None = None
    compilation_config: CompilationConfig = get_field(VllmConfig, "compilation_config")
    derived_config: DerivedConfig | None = None

    @staticmethod
    def add_cli_args(parser):
        group = parser.add_argument_group(title="ModelConfig")
        group.add_argument("--model", **kwargs["model"])
        group.add_argument("--served-model-name", **kwargs["served_model_name"])
        group.add_argument("--max-model-len", **kwargs["max_model_len"])
        group.add_argument("--tensor-parallel-size", "-tp", **kwargs["tensor_parallel_size"])
        group.add_argument("--enable_eplb", **kwargs["enable_eplb"])
        group.add_argument("--enforce-eager", deprecated=True)
        group.add_argument("--speculative-config", "-sc")
        group.add_argument("--compilation-config", "-cc")
        group.add_argument("--derived-config")
        return parser
"""
FRONTEND = """
class BaseFrontendArgs:
    chat_template: str | None = None

class FrontendArgs(BaseFrontendArgs):
    host: str | None = None
    port: int = 8000
    middleware: list[str] = field(default_factory=list)

def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true")
"""
SPECULATIVE = "class SpeculativeConfig:\n    method: str = ''\n    num_speculative_tokens: int = 0\n    CONSTANT = 1\n"
COMPILATION = (
    "class CompilationConfig:\n    mode: int = 0\n    custom_ops: list = []\n"
    "class DerivedConfig(CompilationConfig):\n    more: int = 0\n"
)


def wheel(directory: Path, **changes: str) -> Path:
    files = {
        "__init__.py": "",
        "engine/arg_utils.py": ENGINE,
        "entrypoints/openai/cli_args.py": FRONTEND,
        "config/speculative.py": SPECULATIVE,
        "config/compilation.py": COMPILATION,
    }
    files |= {name.replace("__", "/") + ".py": text for name, text in changes.items()}
    record = ""
    path = directory / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"vllm/{name}", text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"vllm/{name},sha256={digest},{len(text)}\n"
        archive.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\nVersion: 0.99.0\n")
        archive.writestr("vllm-0.99.0.dist-info/RECORD", record)
    return path


def test_options_are_those_that_are_added_and_the_frontends_fields(tmp_path: Path) -> None:
    options = options_of(package_of_wheel(wheel(tmp_path)))
    assert options.names == {
        *("model", "served-model-name", "max-model-len", "tensor-parallel-size", "enable-eplb", "enforce-eager"),
        *("speculative-config", "compilation-config", "derived-config"),
        *("chat-template", "host", "port", "middleware", "headless"),
    }
    # Of a class with a base, not all keys are known.
    assert options.keys == {
        "speculative-config": {"method", "num_speculative_tokens"},
        "compilation-config": {"mode", "custom_ops"},
    }


@pytest.mark.parametrize(
    "wanted",
    [
        {"max-model-len": 1, "max_model_len": 1},
        {"no-enable-eplb": True, "enable_eplb": False},
        {"compilation-config": {"mode": 3, "custom-ops": []}, "compilation-config.mode": 3},
        {"compilation_config.custom_ops": [], "compilation-config.mode.x": 3, "derived-config.anything": 1},
        {"compilation-config": '{"anything": 1}', "derived-config": {"anything": 1}},
        {"speculative-config": {}},
        {},
    ],
)
def test_what_the_release_takes_is_no_problem(tmp_path: Path, wanted: dict[str, object]) -> None:
    assert options_of(package_of_wheel(wheel(tmp_path))).problems(wanted) == []


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"max-modl-len": 1}, "max-modl-len: the nearest that it has is max-model-len"),
        ({"enable_eplbs": True}, "enable-eplbs: the nearest that it has is enable-eplb"),
        ({"no-such-thing": 1}, "no-such-thing: it has none like it"),
        (
            {"compilation-config.mode.x": 1, "compilation-conf.x": 1},
            "compilation-conf: the nearest that it has is compilation-config",
        ),
        (
            {"compilation-config.modes": 3},
            "compilation-config.modes: the nearest that it has is compilation-config.mode",
        ),
        ({"compilation-config.level.x": 3}, "compilation-config.level: it has none like it"),
        ({"compilation-config": {"level": 3}}, "compilation-config.level: it has none like it"),
        (
            {"speculative-config": {"num_spec_tokens": 3}},
            "speculative-config.num_spec_tokens: the nearest that it has is speculative-config.num_speculative_tokens",
        ),
    ],
)
def test_what_it_does_not_take_is_named_with_the_nearest(
    tmp_path: Path, wanted: dict[str, object], problem: str
) -> None:
    assert options_of(package_of_wheel(wheel(tmp_path))).problems(wanted) == [f"vLLM 0.99.0 has no option {problem}"]


def test_a_source_of_another_shape_is_refused_with_the_remedy(tmp_path: Path) -> None:
    changed = wheel(tmp_path, entrypoints__openai__cli_args="def nothing(): ...\n")
    with pytest.raises(Refusal, match=r"host, middleware, port not found; set vllm_service_check_options to false"):
        options_of(package_of_wheel(changed))
    broken = wheel(tmp_path, engine__arg_utils="class (\n")
    with pytest.raises(Refusal, match=r"vllm/engine/arg_utils\.py of 0\.99\.0 is no Python"):
        options_of(package_of_wheel(broken))


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    good = check_options(path, {"max-model-len": 1})
    assert good == {"vllm_version": "0.99.0", "known": 14, "problems": []}
    assert check_options(path, {"max-modl-len": 1, "porl": 2})["problems"] == [
        "vLLM 0.99.0 has no option max-modl-len: the nearest that it has is max-model-len",
        "vLLM 0.99.0 has no option porl: the nearest that it has is port",
    ]
    with pytest.raises(Refusal, match=r"/nowhere\.whl cannot be read as a wheel"):
        check_options(Path("/nowhere.whl"), {})

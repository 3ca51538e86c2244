# SPDX-License-Identifier: Apache-2.0
"""What stands before the model is run as the source has it: the list of allowed models, the drafter's loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.aerie.gates import check_allow_list, check_loader
from ansible.module_utils.aerie.symbolic import ProofError

ALLOW_LIST = """\
class Config:
    def verify(self):
        count = mystery(self)
        allowed = ["llama", "deepseek_v"]
        if self.method == "eagle3" and not any(
            name in self.target_model_config.hf_text_config.model_type for name in allowed
        ):
            raise ValueError(f"only for {allowed}")
        return self
"""

LOADER = """\
class Proposer:
    def load_model(self, target_model):
        self.model = get_model(mystery)
        if supports_multimodal(target_model):
            if self.get_model_name(target_model) == "Wrapper":
                self.model.config.image_token_index = target_model.config.media_placeholder_token_id
            else:
                self.model.config.image_token_index = target_model.config.image_token_index
            target_language_model = cast(Mystery, target_model).get_language_model()
        else:
            target_language_model = target_model
        share(target_language_model)
"""


class Wrapper:
    """A target as the loader gets it; it holds what ``get_language_model`` gives."""

    def __init__(self, language_model: object) -> None:
        self.language_model = language_model
        self.config: Any = None

    def get_language_model(self) -> object:
        return self.language_model


def load(source: str, **parts: object) -> None:
    embedding, head = object(), object()
    causal_lm = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head)
    causal_lm.__dict__.update(parts)
    check_loader("loader.py", source.encode(), Wrapper(causal_lm), embedding, head)


def test_the_allow_list_lets_a_model_pass_or_is_named() -> None:
    check_allow_list("config.py", ALLOW_LIST.encode(), ["llama", "deepseek_v3"])
    with pytest.raises(ProofError, match=r"config\.py refuses the model type kimi_k2: only for \['llama', "):
        check_allow_list("config.py", ALLOW_LIST.encode(), ["deepseek_v3", "kimi_k2"])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("x = 1\n", id="no list"),
        pytest.param(ALLOW_LIST.replace("eagle3", "other"), id="a list for another method"),
        pytest.param(ALLOW_LIST.replace("raise ValueError", "warn"), id="a list that only warns"),
    ],
)
def test_a_release_without_an_allow_list_for_eagle3_passes(source: str) -> None:
    check_allow_list("config.py", source.encode(), ["kimi_k2"])


def test_the_loader_finds_what_it_needs() -> None:
    load(LOADER)
    load("x = 1\n")


@pytest.mark.parametrize(
    ("source", "parts", "fault"),
    [
        pytest.param(
            LOADER.replace('"Wrapper"', '"Other"'),
            {},
            r"loader\.py raises AttributeError: .*no attribute 'image_token_index'",
            id="image token",
        ),
        pytest.param(
            LOADER.replace("media_placeholder_token_id", "__class__"),
            {},
            r"loader\.py does not find the target's image token",
            id="another image token",
        ),
        pytest.param(LOADER, {"model": SimpleNamespace()}, "no attribute 'embed_tokens'", id="no embedding"),
        pytest.param(
            LOADER,
            {"model": SimpleNamespace(embed_tokens=object()), "lm_head": object()},
            "does not find the target's embedding, output head",
            id="other embedding and head",
        ),
    ],
)
def test_a_loader_that_cannot_take_the_target_apart_is_named(source: str, parts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ProofError, match=fault):
        load(source, **parts)

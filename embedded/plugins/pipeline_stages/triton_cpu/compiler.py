# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend: Triton looks for the class, and the interpreter never calls it."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("the interpreter compiles nothing")

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> None:
        raise NotImplementedError("the interpreter compiles nothing")

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError("the interpreter compiles nothing")

    def get_module_map(self) -> dict[str, Any]:
        raise NotImplementedError("the interpreter compiles nothing")

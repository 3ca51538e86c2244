# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named `cpu` for Triton's interpreter (TRITON_INTERPRET=1), which compiles nothing.

vLLM's Model Runner V2 wants Triton, and Triton wants a backend that is active; a machine without GPUs has none.
"""

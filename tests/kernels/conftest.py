"""Triton kernels without a GPU run in Triton's interpreter (tests/conftest.py asks for it before triton is imported)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreter_on_new_numpy() -> None:
    """Triton 3.6's interpreter turns one-element arrays into loop bounds by `int`, which numpy 2.4 refuses."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_bounds(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_bounds


@pytest.fixture(scope="session", autouse=True)
def _interpreter_multiplies_bfloat16() -> None:
    """Triton 3.6's interpreter keeps bfloat16 as integers, and `dot` multiplies those."""
    try:
        import numpy as np
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return
    create_dot = InterpreterBuilder.create_dot

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_wide_dot(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_wide_dot

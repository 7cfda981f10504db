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

"""Triton's interpreter for tests: kernels run on the CPU, operation by operation in numpy."""

import os

import pytest


def require() -> None:
    """Switch the interpreter on before a kernel is imported; skip where triton is missing or was imported without."""
    if os.environ.get("TRITON_INTERPRET", "1") != "1":
        pytest.skip("TRITON_INTERPRET is set to something else than 1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.runtime import interpreter

    known = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        known(tensor, scope)
        # numpy 2.4 turns no array of one element into an integer any more, which loop bounds rely on
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    # every integer operation would be followed by five that check it for overflow
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)

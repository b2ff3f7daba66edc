"""Triton's interpreter for tests: kernels run on the CPU, operation by operation in numpy."""

import os

import pytest
import torch


def require() -> None:
    """Switch the interpreter on before a kernel is imported.

    Skips where triton is missing, and where there is a GPU: there the kernels themselves are tested, by the tests
    marked ``gpu``, which could not run in a process that interprets (``TRITON_INTERPRET=1`` asks for it all the same).
    """
    asked = os.environ.get("TRITON_INTERPRET")
    if asked not in (None, "1") or (asked is None and torch.cuda.is_available()):
        pytest.skip("kernels run on the GPU here; TRITON_INTERPRET=1 interprets them", allow_module_level=True)
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

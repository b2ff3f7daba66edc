"""Triton's interpreter for tests: kernels run on the CPU, operation by operation in numpy."""

import os
import sys
from functools import cache
from typing import Any

import pytest
import torch


def require() -> None:
    """Switch the interpreter on before a kernel is imported.

    Skips where triton is missing, and where there is a GPU: there the kernels themselves are tested, by the tests
    marked ``gpu``, which could not run in a process that interprets (``TRITON_INTERPRET=1`` asks for it all the same).
    Raises RuntimeError if triton has been imported without the interpreter; ``tests/conftest.py`` prevents that.
    """
    asked = os.environ.get("TRITON_INTERPRET")
    if asked not in (None, "1") or (asked is None and torch.cuda.is_available()):
        pytest.skip("kernels run on the GPU here; TRITON_INTERPRET=1 interprets them", allow_module_level=True)
    if asked is None and "triton" in sys.modules:  # its kernels and its own functions are not interpreted any more
        raise RuntimeError("triton was imported before its interpreter was switched on: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="triton is not installed")
    adapt()


@cache
def adapt() -> None:
    """Adapt the interpreter to this numpy, and spare it what it does again and again."""
    from triton.runtime import interpreter

    known = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        known(tensor, scope)
        # numpy 2.4 turns no array of one element into an integer any more, which loop bounds rely on
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    # every integer operation would be followed by five that check it for overflow
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    patch_once_per_launch(interpreter)


def patch_once_per_launch(interpreter: Any) -> None:
    """Patch the language once per launch, not in each call of a function by a kernel, which takes most of the time.

    A patch that is repeated within a launch changes nothing: what it would replace has been replaced already.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (interpreter.tl, interpreter.tl.core)
    patched: set[int] = set()

    @cache
    def visible(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if any(value is m for m in modules))

    def patch_new(function: Any) -> Any:
        if patched and visible(function) <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.update(visible(function))
        return scope

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_new
    interpreter.GridExecutor.__call__ = launch_anew

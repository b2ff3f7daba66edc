"""Entry to a command: Ctrl-C at any moment ends it with one line and a shell's exit status, without a traceback.

This module imports next to nothing, because it guards the imports of the commands.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

#: exit status of an interrupted command: 128 + SIGINT, as in shells
INTERRUPTED = 130
#: module of the worker processes, which their parent ends
_WORKER = "kvbench.parallel.crew_worker"
Arguments = ParamSpec("Arguments")


def guard() -> None:
    """Make Ctrl-C end this process at once; kvbench calls this when ``python -m`` begins to import it.

    Nothing is done if Ctrl-C is ignored or already has another handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN if _WORKER in sys.orig_argv else _end)


def _end(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def enter(main: Callable[[], int | None]) -> int:
    """Call the main function of a command, and return the exit status.

    While `main` runs, Ctrl-C raises KeyboardInterrupt. If `main` catches it, it must print a line of its own and return
    :data:`INTERRUPTED`; otherwise this function does so.
    """
    guarded = signal.getsignal(signal.SIGINT) is _end
    try:
        if guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main() or 0
    except KeyboardInterrupt:
        if guarded:  # a second Ctrl-C
            signal.signal(signal.SIGINT, _end)
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        # an interruption inside a text that is executed, as dataclasses do, leaves a mark with which Python ends by the
        # signal in place of the status; executing another text clears it
        exec("")
        if guarded:  # what follows is the end of the interpreter
            signal.signal(signal.SIGINT, _end)


def reporting(interrupted: str = "interrupted") -> Callable[[Callable[Arguments, int]], Callable[Arguments, int]]:
    """Decorate the main function of a command: a KvbenchError is printed, and its exit status returned.

    Of an OSError, such as a full disk, the file and the reason are printed, and the status is 1. Ctrl-C prints
    `interrupted`, and :data:`INTERRUPTED` is returned. If nobody reads the output any more, as behind ``| head``, the
    status is 0.
    """

    def decorate(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
        @wraps(main)
        def reported(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            from kvbench.errors import KvbenchError, disk_message

            try:
                status = main(*args, **kwargs)
                sys.stdout.flush()
                return status
            except KvbenchError as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code
            except KeyboardInterrupt:
                print(interrupted, file=sys.stderr)
                return INTERRUPTED
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            except OSError as error:
                print(f"error: {disk_message(error)}", file=sys.stderr)
                return 1

        return reported

    return decorate

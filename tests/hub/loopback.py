"""A watch on connections: those to other machines are refused and written down.

Only the standard library is imported, so that a ``sitecustomize.py`` can begin the watch before anything else runs.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def is_loopback(host: str) -> bool:
    """Return True if a name or an address of a machine is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def watch(stranger: Callable[[str], object]) -> Callable[[], None]:
    """Refuse connections to other machines and look-ups of their names, and return a function that ends this.

    Args:
        stranger: called with each name or address that was refused.
    """
    before = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    look_up = socket.getaddrinfo

    def refusing(name: str) -> Callable[..., Any]:
        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(str(address[0])):
                stranger(str(address[0]))
                raise ConnectionRefusedError(f"{address[0]} is not this machine")
            return before[name](self, address)

        return connect

    def getaddrinfo(host: Any, *rest: Any, **options: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text and not is_loopback(text):
            stranger(text)
            raise socket.gaierror(socket.EAI_NONAME, f"{text} is not this machine")
        return look_up(host, *rest, **options)

    for name in before:
        setattr(socket.socket, name, refusing(name))
    socket.getaddrinfo = getaddrinfo

    def end() -> None:
        for name, function in before.items():
            setattr(socket.socket, name, function)
        socket.getaddrinfo = look_up

    return end


@contextmanager
def watched() -> Iterator[list[str]]:
    """Watch until the block ends, and return the list to which refused names and addresses are added."""
    strangers: list[str] = []
    end = watch(strangers.append)
    try:
        yield strangers
    finally:
        end()

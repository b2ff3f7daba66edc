"""The first tokens and the newest exact, all between them packed per token: a method from outside the package."""

from dataclasses import dataclass

from kvbench.methods import RecencyMethod


@dataclass(kw_only=True)
class RecentFour(RecencyMethod):
    """Sinks and a window of the newest tokens."""

    sinks: int = 4
    residual: int = 32

    def exact(self, n):
        """Return the window."""
        return min(n, self.residual)

"""Four sinks and the newest tokens exact, all between them in 4 bits per token: a method outside the package."""

from dataclasses import dataclass

from kvbench.methods import RecencyMethod


@dataclass(kw_only=True)
class RecentFour(RecencyMethod):
    """Pack every token that is neither among the first nor among the newest."""

    sinks: int = 4
    residual: int = 32

    def exact(self, n):
        """Return how many of the newest tokens are exact once n have followed the sinks."""
        return min(n, self.residual)

"""How long emulated responses are.

A length depends on the distribution, the run's seed, the trajectory's id and its prompt
alone. So every schedule sees the same work, and a trajectory that is resumed has the length that it
had.
"""

import math
import statistics
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

LengthKind = Literal["fixed", "uniform", "lognormal", "empirical"]

_NORMAL = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of response lengths in tokens.

    `fixed` is always `mean`, `uniform` runs from 1 to `2 * mean - 1`, `lognormal` has the mean
    `mean` and the standard deviation `sigma` of its logarithm, and `empirical` draws from `values`
    with replacement. `prompt_share` is the share of the logarithm's variance that belongs to the
    prompt: responses to one prompt resemble one another.
    """

    kind: LengthKind
    mean: float = 64.0
    sigma: float = 1.0
    prompt_share: float = 0.0
    values: tuple[int, ...] = ()

    def draw(self, seed: int, trajectory_id: str, prompt: int | str = 0) -> int:
        """Length of a trajectory, at least 1 and without an upper bound; `prompt` tells prompts
        apart."""
        if self.kind == "fixed" or (self.kind == "lognormal" and self.sigma == 0):
            return max(1, round(self.mean))
        share = fraction(f"{seed}:{trajectory_id}")
        if self.kind == "empirical":
            return self.values[int(share * len(self.values))]
        if self.kind == "uniform":
            return max(1, round(1 + math.floor(share * (2 * self.mean - 1))))
        normal = _NORMAL.inv_cdf(share)
        if self.prompt_share > 0:
            common = _NORMAL.inv_cdf(fraction(f"{seed}:prompt:{prompt}"))
            normal = (
                math.sqrt(self.prompt_share) * common + math.sqrt(1 - self.prompt_share) * normal
            )
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(math.exp(mu + self.sigma * normal)))


def fraction(key: str) -> float:
    """A pseudo-random number in (0, 1) that depends on the key alone."""
    drawn = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    return ((drawn >> 11) + 0.5) / 2**53

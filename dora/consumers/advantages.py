"""Advantages of a group's trajectories relative to one another.

Invariant: the advantages of a group add up to zero, and a group whose rewards are all equal has
advantages of exactly zero, so that leaving it out of the forward pass changes nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dora.core.groups import has_signal

STD_EPSILON = 1e-6
"""Added to the standard deviation, as implementations of GRPO do, so that nearly equal rewards do
not blow up."""


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool) -> npt.NDArray[np.float32]:
    """Advantages of shape [G] from the rewards of one group.

    With `divide_by_std`: (r - mean) / (std + 1e-6) with the population standard deviation (GRPO,
    arXiv 2402.03300, section 4.1.2). Without: r - mean (Dr. GRPO, arXiv 2503.20783, section 3.2,
    which removes the bias towards prompts that are nearly always or nearly never solved).
    """
    if not has_signal(rewards):
        return np.zeros(len(rewards), dtype=np.float32)
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    if divide_by_std:
        centred /= values.std() + STD_EPSILON
    return np.asarray(centred, dtype=np.float32)

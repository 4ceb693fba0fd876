"""The learning rate as a function of the optimizer update.

Invariant: it depends on the settings and the number of the update alone, so a redone step uses the
same rate as the first time.
"""

import math

from dora.config_training import OptimizerSection


def learning_rate(settings: OptimizerSection, update: int, total: int) -> float:
    """Rate of the `update`-th optimizer update, counted from 0, of `total` in the run.

    Rises linearly from zero over `warmup_steps` updates to the peak, which the last of them has.
    Then constant, or linear or cosine decay that would reach zero right after the last update.
    """
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    length = max(total - settings.warmup_steps, 1)
    done = min((update - settings.warmup_steps) / length, 1.0)
    if settings.schedule == "linear":
        return settings.learning_rate * (1.0 - done)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))

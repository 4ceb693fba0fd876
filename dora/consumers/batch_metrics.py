"""What a batch of samples says by itself, whoever trains on it.

Invariant: it depends on the samples and the current version alone.
"""

from collections.abc import Sequence

import numpy as np

from dora.consumers.batches import Sample


def batch_metrics(
    samples: Sequence[Sample], version: int, success_threshold: float
) -> dict[str, float]:
    """What a batch of samples says by itself: rewards, lengths, staleness."""
    rewards = np.array([s.reward for s in samples], dtype=np.float64)
    lengths = np.array([s.generated for s in samples], dtype=np.float64)
    staleness = np.array([version - s.version for s in samples], dtype=np.float64)
    return {
        "reward_mean": float(rewards.mean()),
        "success_rate": float((rewards >= success_threshold).mean()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "tokens": float(lengths.sum()),
        "trajectories": float(len(samples)),
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "mixed_version_share": float(np.mean([s.mixed for s in samples])),
        "truncated_fraction": float(np.mean([s.truncated for s in samples])),
        "signal_fraction": float(np.mean([s.advantage != 0.0 for s in samples])),
    }

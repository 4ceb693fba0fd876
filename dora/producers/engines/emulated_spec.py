"""What an emulated device is like, from the configuration.

Invariant: a length file is read and checked before anything is generated, whole.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from dora.config import Config
from dora.config.emulation import EmulatedSection
from dora.errors import PolicyError
from dora.simulation.device import DeviceSpec
from dora.simulation.lengths import Lengths

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EmulatedSpec:
    """One emulated device: the configured times and lengths, its own speed, and the lengths that
    `empirical` draws from."""

    section: EmulatedSection
    speed: float = 1.0
    length_values: tuple[int, ...] = ()

    def device(self) -> DeviceSpec:
        """The device of these times."""
        section = self.section
        return DeviceSpec(
            section.iteration_seconds,
            section.iteration_seconds_per_sequence,
            section.iteration_seconds_per_context_token,
            section.prefill_seconds_per_token,
            section.load_seconds,
            section.kv_cache_tokens,
            self.speed,
        )

    def lengths(self) -> Lengths:
        """The distribution of these lengths."""
        section = self.section
        return Lengths(
            section.length,
            section.length_mean,
            section.length_sigma,
            section.length_prompt_share,
            self.length_values,
        )


def emulated_spec(config: Config, worker: str) -> EmulatedSpec:
    """The device of the worker with this name; PolicyError if the length file is unusable."""
    section = config.rollout.emulated
    speeds = section.speeds
    number = re.search(r"(\d+)$", worker)
    speed = speeds[int(number.group(1) if number else 0) % len(speeds)] if speeds else 1.0
    values: tuple[int, ...] = ()
    if section.length == "empirical" and section.length_file is not None:
        values = read_lengths(config.home / section.length_file)
        cut = sum(value > config.rollout.max_new_tokens for value in values)
        if cut:
            log.warning(
                "%d of %d lengths in %s are cut at rollout.max_new_tokens = %d",
                cut, len(values), section.length_file, config.rollout.max_new_tokens,
            )  # fmt: skip
    return EmulatedSpec(section, speed, values)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths in tokens, one a line; empty lines are skipped.

    PolicyError, with file and line, for a file that is missing or empty and for a line that is no
    positive whole number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(
            f"rollout.emulated.length_file: {path} cannot be read: {error}",
            hint="One response length in tokens a line; the path starts from the configuration "
            "file's directory.",
        ) from error
    values = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
            raise PolicyError(
                f"rollout.emulated.length_file: {path} line {number} is {text[:40]!r}, not a "
                "length in tokens",
                hint="One positive whole number a line.",
            )
        values.append(int(text))
    if not values:
        raise PolicyError(f"rollout.emulated.length_file: {path} holds no length")
    return tuple(values)

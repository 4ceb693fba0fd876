"""Files that somebody may read at any moment.

Invariant: at its path there is the former content or the whole new one, never a part of it.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8; its directory must exist. OSError for what the disk refuses."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

"""Writing files that may be read at any moment."""

import os
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Write `text` as UTF-8; a reader sees the former content or all of the new one.

    The directory must exist. OSError for what the disk refuses.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

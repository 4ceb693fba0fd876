"""Files with one JSON object a line.

Invariant: a line is an object, or what is wrong with it is said in words for people.
"""

import json
from typing import Any


def object_of(line: bytes) -> dict[str, Any]:
    """The object of a line; ValueError, with why, if it holds none."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, not an object")
    return value

"""Reading files with one JSON object a line."""

import json
from typing import Any


def parse_json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; ValueError with the reason if there is none."""
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

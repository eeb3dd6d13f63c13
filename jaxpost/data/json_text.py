"""JSON text to values, with one kind of error whatever is wrong with it."""

import json
import re
from typing import Any

HALF = re.compile(r"\\u[dD][89a-fA-F]")  # as halves of a character beyond U+FFFF are written


def loads(text: str) -> Any:
    """What a JSON text stands for.

    Raises:
      ValueError: not JSON (then a `json.JSONDecodeError`), or nested too deep, or with a number of
        thousands of digits, or with half of a character.
    """
    try:
        value = json.loads(text)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{half} is half of a character, and the other half is missing") from error
    except ValueError as error:
        raise ValueError(f"JSON with a number that is too long: {error}") from error
    return value

"""Random damage to text and to data, for the fuzzers of readers (`fuzz.py`, `fuzz_checkpoints.py`)
and of trainings (`edited_plans.py`).
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import yaml

# A file that only code run from a damaged file would write.
CANARY = "alpa_fuzz_canary"

# Values that readers do not expect.
NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
)
TEXTS = (
    # placements and numbers that look almost right
    *(
        "",
        " ",
        "a",
        "R",
        "S0",
        "R*",
        "S99999999999",
        "G0 S0",
        "->",
        "S0->S0@x",
        "1e400",
        "x" * 5000,
        "é" * 50,
    ),
    *(
        "\x1b[2J",
        "[red]x[/red]",
        "[/]",
        "\ud800",
        "\u202e",
        "a\nb",
        "<script>alert(1)</script>",
        "../../etc/passwd",
    ),
    *(
        "${oc.env:HOME}",
        "${a.b}",
        "${",
        "!!python/object/apply:os.system",
        f"__import__('os').mknod('{CANARY}')",
    ),
)
NESTED = (
    [],
    {},
    [[]],
    [[[[[]]]]],
    {"": ""},
    [1, "a", None],
    {"a": {"a": {"a": {}}}},
    [10**9],
    [0],
    [-1, 2],
    [1] * 300,
)
ODD: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *NESTED)


def damaged(text: str, suffix: str, random_numbers: random.Random) -> bytes:
    """One to four changes, to the data (two times in three) or to the bytes."""
    if random_numbers.random() < 0.67:
        try:
            return damaged_data(text, suffix, random_numbers).encode("utf-8", "surrogatepass")
        except (ValueError, yaml.YAMLError):
            pass  # odd values that the format cannot write: damage its bytes
    content = bytearray(text.encode())
    for _ in range(random_numbers.randint(1, 4)):
        place = random_numbers.randrange(len(content) + 1)
        end = min(len(content), place + random_numbers.choice([1, 2, 10, 1000]))
        match random_numbers.randrange(5):
            case 0:
                content[place:end] = b""
            case 1:
                content[place:place] = random_numbers.randbytes(random_numbers.choice([1, 3, 20]))
            case 2:
                content[place:place] = content[place:end] * random_numbers.choice([2, 50])
            case 3:
                content[place:] = b""
            case 4:
                odd = [
                    b"[" * 3000,
                    b"{" * 500,
                    b"9" * 5000,
                    b"1e999",
                    b"NaN",
                    b"\x00",
                    b"&a [*a]",
                    b"<<: *a",
                    b"${a}",
                ]
                content[place:end] = random_numbers.choice(odd)
        if not content:
            break
    return bytes(content)


def damaged_data(text: str, suffix: str, random_numbers: random.Random) -> str:
    data: Any = yaml.safe_load(text) if suffix == ".yaml" else json.loads(text)
    for _ in range(random_numbers.randint(1, 4)):
        data = changed(data, random_numbers)
    if suffix == ".yaml":
        return yaml.safe_dump(data, allow_unicode=True)
    return json.dumps(data)


def changed(data: Any, random_numbers: random.Random) -> Any:
    """The data with one thing changed somewhere in it."""
    if isinstance(data, dict | list) and data and random_numbers.random() < 0.9:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key, result = random_numbers.choice(keys), copy.copy(data)
        match random_numbers.randrange(8):
            case 0:
                del result[key]
            case 1 if isinstance(result, dict):
                result[str(random_numbers.choice(ODD))[:200]] = result[key]
            case 2:
                result[key] = data[random_numbers.choice(keys)]
            case _:
                result[key] = changed(data[key], random_numbers)
        return result
    if (
        isinstance(data, int | float)
        and not isinstance(data, bool)
        and random_numbers.random() < 0.5
    ):
        return random_numbers.choice([-data, data * 2, data + 1, data * 10**9, str(data)])
    if isinstance(data, str) and random_numbers.random() < 0.5:
        return random_numbers.choice(
            [
                data[::-1],
                data + " ",
                data * 3,
                data.replace("S", "R"),
                data.replace("*", ""),
                data[1:],
            ]
        )
    return random_numbers.choice(ODD)

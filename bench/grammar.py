"""Grammars: tokens per second of 8 rows with and without, and the validity of many answers.

python -m bench.grammar [--model demo] [--rounds 5]
python -m bench.grammar --valid 10000
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from protocol.tools import Grammar
from protocol.types import Sampling
from tests.worker.core.driver import Driver

ROWS = 8
TOKENS = 96
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LONG = Grammar("json_schema", json.dumps({"type": "array", "items": SCHEMA, "minItems": 99}))
ONE = Grammar("json_schema", json.dumps(SCHEMA))


def rate(driver: Driver, grammar: Grammar | None) -> float:
    """Return the tokens per second of `ROWS` rows."""
    for row in range(ROWS):
        sampling = Sampling(temperature=1.0, seed=row)
        more = {} if grammar is None else {"grammar": grammar}
        driver.submit(f"r{row}", "A list:", sampling, max_tokens=TOKENS, ignore_eos=True, **more)
    driver.step()
    start = time.perf_counter()
    driver.run()
    seconds = time.perf_counter() - start
    tokens = sum(len(outcome.tokens) for outcome in driver.outcomes.values())
    driver.outcomes.clear()
    return tokens / seconds


def valid(driver: Driver, count: int) -> tuple[int, int]:
    """Return how many answers match the schema, and how many were given."""
    right = 0
    for start in range(0, count, ROWS):
        for row in range(start, min(count, start + ROWS)):
            sampling = Sampling(temperature=1.0, seed=row)
            driver.submit(f"r{row}", "A pet:", sampling, grammar=ONE, max_tokens=400)
        driver.run()
        for outcome in driver.outcomes.values():
            value = json.loads(outcome.text) if outcome.reason == "stop" else {}
            right += (
                list(value) == ["name", "age", "kind"]
                and len(value["name"]) <= 12
                and 0 <= value["age"] <= 150
                and value["kind"] in {"cat", "dog"}
            )
        driver.outcomes.clear()
    return right, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--valid", type=int, default=0)
    asked = parser.parse_args()
    driver = Driver(asked.model)
    if asked.valid:
        print("valid: {} of {}".format(*valid(driver, asked.valid)))
        return
    rate(driver, LONG)
    pairs = [(rate(driver, None), rate(driver, LONG)) for _ in range(asked.rounds)]
    plain, bound = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"without {plain:.0f} tokens/s, with {bound:.0f} tokens/s: {bound / plain:.3f}")


if __name__ == "__main__":
    main()

"""Answers by random schemas, judged by jsonschema, which shares no code with llguidance.

python -m tests.worker.grammar.valid_campaign 10000 [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.report import publish
from protocol.errors import InvalidRequest
from protocol.tools import Grammar
from protocol.types import Sampling
from tests.worker.core.driver import Driver, Outcome
from tests.worker.grammar.json_schemas import is_valid, random_schema

ROWS = 32
"""Answers at the same time."""
MAX_TOKENS = 96
"""Longer answers are cut off. A random answer to a recursive schema has no bound."""
WORDS = "An example of the data, as JSON:\n"


@dataclass
class Result:
    """What became of the answers."""

    valid: int = 0
    cut: int = 0
    """Answers that reached `MAX_TOKENS`; they cannot be judged and do not count."""
    tokens: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Seeds of schemas whose answers are not valid, with the answer or the error."""

    @property
    def judged(self) -> int:
        return self.valid + len(self.wrong)


def campaign(driver: Driver, seed: int, count: int) -> Result:
    """Collect ``count`` complete answers by schemas from ``seed`` on.

    As soon as one ends, the next one begins.
    """
    result, schemas = Result(), dict[str, str]()
    while True:
        while len(schemas) < min(ROWS, count - result.judged):
            rid, schema = f"s{seed}", json.dumps(random_schema(seed))
            if _submit(driver, rid, schema, result):
                schemas[rid] = schema
            seed += 1
        if not schemas:
            return result
        driver.take(driver.engine.step())
        for rid in [rid for rid in schemas if driver.outcomes[rid].over]:
            _judge(rid, schemas.pop(rid), driver.outcomes.pop(rid), result)


def _judge(rid: str, schema: str, outcome: Outcome, result: Result) -> None:
    result.tokens += len(outcome.tokens)
    if outcome.reason == "length":
        result.cut += 1
    elif outcome.reason == "stop" and is_valid(schema, outcome.text):
        result.valid += 1
    else:
        result.wrong.append((int(rid[1:]), outcome.text or str(outcome.error)))


def _submit(driver: Driver, rid: str, schema: str, result: Result) -> bool:
    sampling = Sampling(temperature=1.0, seed=int(rid[1:]))
    grammar = Grammar("json_schema", schema)
    try:
        driver.submit(rid, WORDS, sampling, grammar=grammar, max_tokens=MAX_TOKENS)
    except InvalidRequest as error:
        del driver.outcomes[rid]
        result.wrong.append((int(rid[1:]), error.message))
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    start = time.monotonic()
    result = campaign(Driver(asked.model), asked.seed, asked.count)
    report = {**asdict(result), "count": asked.count, "seconds": round(time.monotonic() - start, 1)}
    publish(report, asked.json)
    raise SystemExit(bool(result.wrong))


if __name__ == "__main__":
    main()

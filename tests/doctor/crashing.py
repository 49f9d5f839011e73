"""A fake selftest process, in which one trial kills the process and one never ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip", action="append", default=[])
    skipped = parser.parse_args().skip
    for name in ("first", "dies", "second", "hangs", "third"):
        if name in skipped:
            continue
        say(json.dumps({"begin": name}))
        if name == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "hangs":
            time.sleep(60)
        say("a library prints this")
        say(json.dumps({"outcome": {"name": name, "verdict": "ok", "observed": "x"}}))


if __name__ == "__main__":
    main()

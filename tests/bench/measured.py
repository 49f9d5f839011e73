"""A benchmark that writes a report, fails or does not end: ``python -m tests.bench.measured``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--do", choices=["write", "fail", "hang"], required=True)
parser.add_argument("--count", type=Path, help="gets a line for each start")
parser.add_argument("--json", type=Path, required=True)
options = parser.parse_args()
with options.count.open("a") as file:
    file.write("started\n")
bar = {"what": "speed", "value": 2.0, "limit": 3.0, "at_least": True, "passed": False}
options.json.write_text(json.dumps({"bars": [bar]}))
if options.do == "fail":
    sys.exit("no such device")
if options.do == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    options.count.write_text(str(child.pid))
    child.wait()

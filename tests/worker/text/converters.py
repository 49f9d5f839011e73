"""Converters that misbehave: ``KVD_TEST_CONVERTER`` names what this module does as a program."""

import argparse
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--alive", type=int)
    arguments = parser.parse_args()
    log = arguments.model / "runs.bin"  # the key ignores files of weights
    with log.open("a") as stream:
        stream.write(f"{os.getpid()} {arguments.memory}\n")
    deed = os.environ["KVD_TEST_CONVERTER"]
    if deed == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "damage":
        arguments.file.write_bytes(b"no record")
    elif deed == "hang":
        os.read(arguments.alive, 1)
    sys.exit(0)

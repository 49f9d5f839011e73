"""Writes the resources of kvd.rb: the wheels of kvd's dependencies for a Mac with Apple silicon.

    python deploy/homebrew/build.py [--wheel FILE]

uv resolves and locks the dependencies of pyproject.toml for macOS. ``--wheel`` is the built wheel
of kvd: its URL and checksum replace those of the release in the formula.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FORMULA = HERE / "kvd.rb"
PYTHON = (3, 13)
"""Version of Python that the formula depends on."""
MACOS = (14, 0)
"""Oldest macOS of MLX's wheels."""
BEGIN, END = "  # Begin of the generated resources.\n", "  # End of the generated resources.\n"
RESOURCE = """\
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
"""


def tags() -> list[Tag]:
    """Return the tags of wheels that can be installed, the best first."""
    platforms = list(mac_platforms(MACOS, "arm64"))
    return [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, platforms=platforms),
    ]


def lock() -> list[dict[str, Any]]:
    """Return the packages of the lock that uv makes for macOS, ordered by name."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--format", "pylock.toml"]
    command += ["--python-platform", "aarch64-apple-darwin", "--python-version", "3.13"]
    command += ["--no-python-downloads", "--only-binary", ":all:", "pyproject.toml"]
    target = {"MACOSX_DEPLOYMENT_TARGET": ".".join(map(str, MACOS))}
    text = subprocess.run(  # noqa: S603 - uv, with our own arguments
        command, cwd=ROOT, env=os.environ | target, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    packages: list[dict[str, Any]] = tomllib.loads(text)["packages"]
    return packages


def best(package: dict[str, Any]) -> dict[str, Any]:
    """Return the package's wheel for the oldest supported Mac."""
    ranks = {tag: rank for rank, tag in enumerate(tags())}
    found = []
    for wheel in package.get("wheels", []):
        *_, offered = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        found += [(ranks[tag], wheel) for tag in offered if tag in ranks]
    if not found:
        raise SystemExit(f"{package['name']} {package['version']} has no wheel for a Mac")
    return min(found, key=lambda pair: pair[0])[1]


def resources() -> str:
    blocks = []
    for package in lock():
        wheel = best(package)
        sha256 = wheel["hashes"]["sha256"]
        blocks.append(RESOURCE.format(name=package["name"], url=wheel["url"], sha256=sha256))
    return "\n".join(blocks)


def main() -> None:
    """Write the formula."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="kvd's wheel; default: that of the release")
    options = parser.parse_args()
    text = FORMULA.read_text()
    head, _, rest = text.partition(BEGIN)
    if options.wheel is not None:
        digest = hashlib.sha256(options.wheel.read_bytes()).hexdigest()
        head = re.sub(r'url ".*?"', f'url "{options.wheel.resolve().as_uri()}"', head, count=1)
        head = re.sub(r'sha256 ".*?"', f'sha256 "{digest}"', head, count=1)
    FORMULA.write_text(head + BEGIN + resources() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()

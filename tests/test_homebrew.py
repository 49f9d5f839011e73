"""The Homebrew formula: Ruby reads it, and its resources are those of the dependencies.

A stand-in for Homebrew's classes records what the formula declares. `deploy/homebrew/build.py`
writes the resources.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags, mac_platforms
from packaging.utils import canonicalize_name, parse_wheel_filename

import kvd

ROOT = Path(__file__).parent.parent
FORMULA = ROOT / "deploy/homebrew/kvd.rb"

HOMEBREW = """
require "json"
require "pathname"

class Recorder
  attr_reader :found
  def initialize(block) = (@found = Hash.new { |all, key| all[key] = [] }; instance_eval(&block))
  def method_missing(name, *values, **options) = @found[name] << [*values, options]
  def respond_to_missing?(*) = true
  def var = Pathname("/opt/homebrew/var")
  def opt_bin = Pathname("/opt/homebrew/opt/kvd/bin")
end

class Formula
  Declared = Hash.new { |all, key| all[key] = [] }
  def self.test = nil # or it is the method of all objects
  def self.method_missing(name, *values, **options, &block)
    Declared[name] << [*values, options, block && Recorder.new(block).found]
  end
  def self.respond_to_missing?(*) = true
end

load ARGV[0]
methods = Kvd.instance_methods(false)
puts JSON.generate({declared: Formula::Declared, methods: methods})
"""


@pytest.fixture(scope="module")
def formula(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the formula declares: for each word the list of its values, options and block."""
    if shutil.which("ruby") is None:
        pytest.skip("needs ruby")
    stand_in = tmp_path_factory.mktemp("brew") / "homebrew.rb"
    stand_in.write_text(HOMEBREW)
    command = ["ruby", "-w", str(stand_in), str(FORMULA)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wheels() -> dict[str, str]:
    """Return the file names of the resources' wheels by name."""
    text = FORMULA.read_text()
    return dict(re.findall(r'resource "(.+?)" do\n +url ".*/(.+?\.whl)", using: :nounzip', text))


def test_the_formula_declares_a_service_and_an_installation(formula: dict[str, Any]):
    declared = formula["declared"]
    *_, service = declared["service"][0]

    assert formula["methods"] == ["install"]
    assert service["run"] == [[["/opt/homebrew/opt/kvd/bin/kvd", "serve"], {}]]
    assert service["keep_alive"] == [[{"successful_exit": False}]]
    assert declared["license"][0][0] == "Apache-2.0"
    assert f"mlx_kvd-{kvd.__version__}-py3-none-any.whl" in declared["url"][0][0]
    depends = [one[0] for one in declared["depends_on"]]
    assert depends == [{"arch": "arm64"}, {"macos": "sonoma"}, "python@3.13"]
    names = [one[0] for one in declared["resource"]]
    assert names == sorted(names) == sorted(wheels())
    for *_, resource in declared["resource"]:
        assert re.fullmatch(r"[0-9a-f]{64}", resource["sha256"][0][0])
        assert resource["url"][0][0].startswith("https://files.pythonhosted.org/packages/")


def test_the_resources_meet_the_requirements_for_a_mac():
    """If this fails, run deploy/homebrew/build.py."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    versions = {name: parse_wheel_filename(wheel)[1] for name, wheel in wheels().items()}
    for requirement in map(Requirement, required):
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"sys_platform": "darwin"}):
            assert versions[name] in requirement.specifier, name
        else:
            assert name == "mlx" or name not in versions
    assert versions["mlx-metal"] == versions["mlx"]
    assert not {"mlx-cpu", "nanobind", "matplotlib", "pytest"} & versions.keys()


def test_every_resource_is_a_wheel_for_the_oldest_mac():
    platforms = list(mac_platforms((14, 0), "arm64"))
    usable = {
        *cpython_tags((3, 13), platforms=platforms),
        *compatible_tags((3, 13), platforms=platforms),
    }
    assert len(wheels()) > 30
    for name, wheel in wheels().items():
        found, _, _, tags = parse_wheel_filename(wheel)
        assert canonicalize_name(found) == name
        assert usable & tags, wheel

"""The threads of native operations, watched by the compiler's race detector."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvd.worker.native import build

PROGRAM = """
#include "pool.h"

int main() {
  kvd::Pool pool;
  std::atomic<bool> over{false};
  auto resize = [&] {
    for (int i = 0; i < 50; ++i) {
      pool.resize(1 + i % 4);
    }
  };
  std::thread first([&] { resize(); });
  std::thread second([&] { resize(); over = true; });
  bool complete = true;
  while (!over) {
    std::atomic<int> sum{0};
    pool.share(64, 4, [&](int first, int last) { sum += last - first; });
    complete = complete && sum == 64 && pool.threads() <= 4;
  }
  first.join();
  second.join();
  pool.resize(1);
  return complete ? 0 : 1;
}
"""


def test_threads_can_be_resized_while_another_thread_shares_a_loop(tmp_path: Path) -> None:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "race"
    source = program.with_suffix(".cpp")
    source.write_text(PROGRAM)
    folder = Path(build.__file__).parent / "src"
    flags = ["-std=c++17", "-O1", "-fsanitize=thread", "-pthread", f"-I{folder}"]
    command = [compiler, *flags, source, "-o", program]
    built = subprocess.run(command, check=False, capture_output=True)
    if built.returncode and b"san" in built.stderr:
        pytest.skip("the compiler has no race detector")
    assert built.returncode == 0, built.stderr.decode()

    ran = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)

    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("the race detector does not run on this kernel")
    assert (ran.returncode, ran.stderr) == (0, "")

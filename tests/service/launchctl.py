"""A fake `launchctl` for machines without launchd. It starts an agent's program as a real process.

It has the subcommands that kvd uses, with the exit statuses of the real ones. Its state is in the
folder that the environment variable ``FAKE_LAUNCHD`` names.
"""

from __future__ import annotations

import os
import plistlib
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(os.environ["FAKE_LAUNCHD"])
DOMAIN = f"gui/{os.getuid()}"


def main(command: str, *arguments: str) -> int:
    if command == "enable" or arguments == (DOMAIN,):
        return 0
    if command == "bootstrap":
        return bootstrap(Path(arguments[1]))
    job = HERE / f"{arguments[-1].removeprefix(DOMAIN + '/')}.plist"
    if not job.exists():
        return 113 if command == "print" else 3
    return {"print": show, "bootout": boot_out, "kickstart": start, "kill": kill}[command](
        job, *arguments[:-1]
    )


def bootstrap(file: Path) -> int:
    agent = plistlib.loads(file.read_bytes())
    job = HERE / f"{agent['Label']}.plist"
    if job.exists():
        sys.stderr.write("Bootstrap failed: 5: Input/output error\n")
        return 5
    job.write_bytes(file.read_bytes())
    return start(job) if agent.get("RunAtLoad") else 0


def start(job: Path) -> int:
    agent = plistlib.loads(job.read_bytes())
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": os.environ["HOME"]}
    with (
        Path(agent["StandardOutPath"]).open("ab") as out,
        Path(agent["StandardErrorPath"]).open("ab") as err,
    ):
        process = subprocess.Popen(
            agent["ProgramArguments"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=agent["WorkingDirectory"],
            env=environment | agent["EnvironmentVariables"],
            umask=agent["Umask"],
            start_new_session=True,
        )
    job.with_suffix(".pid").write_text(str(process.pid))
    return 0


def pid_of(job: Path) -> int | None:
    """Return the pid of the job's process if it runs; a zombie counts as ended."""
    try:
        pid = int(job.with_suffix(".pid").read_text())
    except FileNotFoundError:
        return None
    reported = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(reported, capture_output=True, text=True, check=False).stdout.strip()
    return pid if state and not state.startswith("Z") else None


def show(job: Path) -> int:
    pid = pid_of(job)
    if pid is None and job.with_suffix(".leaving").exists():
        for suffix in (".leaving", ".pid", ".plist"):
            job.with_suffix(suffix).unlink(missing_ok=True)
        return 113
    lines = [f"\tstate = {'running' if pid else 'not running'}"]
    lines += [f"\tpid = {pid}"] if pid else ["\tlast exit code = 0"]
    if "Sockets" in plistlib.loads(job.read_bytes()):
        lines.append("\tsockets = {")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def boot_out(job: Path) -> int:
    job.with_suffix(".leaving").touch()
    return kill(job, "SIGTERM")


def kill(job: Path, name: str) -> int:
    if (pid := pid_of(job)) is not None:
        os.kill(pid, signal.Signals[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

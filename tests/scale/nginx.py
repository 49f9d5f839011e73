"""nginx with the configuration of deploy/nginx, changed only in its addresses."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator

from tests.scale.fleet import ROOT, Fleet, free_port, running

CONFIG = ROOT / "deploy/nginx/kvd.conf"
PROGRAM = shutil.which(
    "nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin"
)
_SERVER = re.compile(r"\bserver 127\.0\.0\.1:(\d+)")
_LISTEN = re.compile(r"\blisten 127\.0\.0\.1:\d+")


def config_of(fleet: Fleet, port: int) -> str:
    """Return the configuration with the addresses of these daemons."""
    text = CONFIG.read_text()
    old = list(dict.fromkeys(_SERVER.findall(text)))
    new = dict(zip(old, (member.place for member in fleet.members), strict=True))
    text = _SERVER.sub(lambda found: f"server {new[found[1]]}", text)
    text, count = _LISTEN.subn(f"listen 127.0.0.1:{port}", text)
    assert count == 1
    return text


@contextlib.contextmanager
def nginx(fleet: Fleet) -> Iterator[str]:
    """Run nginx before these daemons; yield its address."""
    assert PROGRAM is not None
    folder, port = fleet.root / "nginx", free_port()
    folder.mkdir()
    (folder / "kvd.conf").write_text(config_of(fleet, port))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"  {kind}_temp_path {folder}/{kind};" for kind in kinds)
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off;\npid {folder}/nginx.pid;\nworker_processes 2;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\n  access_log off;\n{temporary}\n  include {folder}/kvd.conf;\n}}\n"
    )
    log = folder / "error.log"
    command = [PROGRAM, "-c", str(main), "-e", str(folder / "start.log"), "-g", f"error_log {log};"]
    url = f"http://127.0.0.1:{port}"
    with running(command, url, "/ready", folder / "output"):
        yield url

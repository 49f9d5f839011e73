"""All targets by name."""

from __future__ import annotations

from tests.fuzz.clients import Clients
from tests.fuzz.configuration import Configuration
from tests.fuzz.folders import Folders
from tests.fuzz.http import Http
from tests.fuzz.segments import Segments
from tests.fuzz.target import Target
from tests.fuzz.templates import Templates
from tests.fuzz.workers import Workers

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (Configuration, Clients, Workers, Http, Templates, Folders, Segments)
}

"""The machine and the home that checks examine; tests substitute other ones."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvd.client import Client
from kvd.config import config, variables
from kvd.config.config import Config
from kvd.config.http import with_command_line
from kvd.doctor.engine import ask
from kvd.host import memory
from kvd.host.home import Home
from protocol.errors import ConfigError, KvdError, NotRunning
from protocol.types import DaemonStatus, HostMemory


@dataclass(frozen=True)
class Scene:
    """A home on a machine."""

    home: Home
    root: Path = Path("/")
    platform: str = sys.platform
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @cached_property
    def config(self) -> Config | ConfigError:
        try:
            return config.load(self.home.config)
        except ConfigError as error:
            return error

    @property
    def settings(self) -> Config:
        """The configuration, or the defaults if it is invalid, which another check reports."""
        return Config() if isinstance(self.config, ConfigError) else self.config

    @property
    def served(self) -> Config:
        """The settings that `kvd serve` would have here; a running daemon has its own variables."""
        if not isinstance(self.status, NotRunning) or self.invalid_variables:
            return self.settings
        budget = variables.budget_of(self.environment)
        port = variables.port_of(self.environment)
        return replace(
            self.settings,
            budget=self.settings.budget if budget is None else budget,
            http=with_command_line(self.settings.http, None, None, default_port=port),
        )

    @property
    def invalid_variables(self) -> list[str]:
        """Why `kvd serve` would refuse this environment."""
        found = []
        for read in (variables.port_of, variables.budget_of):
            try:
                read(self.environment)
            except ValueError as error:
                found.append(str(error))
        return found

    @cached_property
    def host(self) -> HostMemory:
        return memory.reader().host()

    @cached_property
    def engine(self) -> dict[str, Any] | KvdError:
        return ask()

    @cached_property
    def status(self) -> DaemonStatus | KvdError:
        """The running daemon's status, or why there is none."""
        try:
            with Client(home=self.home.root, timeout_s=5.0) as client:
                return client.status()
        except KvdError as error:
            return error

    @property
    def computes_on_cpu(self) -> bool | None:
        """Whether MLX has no accelerator; None if MLX does not run."""
        return None if isinstance(self.engine, KvdError) else self.engine["device"] == "cpu"

    @property
    def machine(self) -> str:
        system = {"darwin": "macOS", "linux": "Linux"}.get(self.platform, self.platform)
        version = platform.mac_ver()[0] if self.platform == "darwin" else platform.release()
        return f"{system} {version}, {platform.machine()}"

"""Removes what identifies a person or a machine from values that a report contains."""

from __future__ import annotations

import getpass
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LEAST_HOST = 3
"""Characters of the shortest host name that is replaced: shorter ones are parts of words."""


@dataclass(frozen=True)
class Names:
    """Texts that a report must not contain."""

    home: str
    kvd_home: str
    temporary: str
    user: str
    host: str
    model: tuple[str, ...] = ()
    """Paths of the measured model's folder."""

    @classmethod
    def of_this_machine(cls, kvd_home: Path, model: tuple[str, ...] = ()) -> Names:
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user id without a name
            user = ""
        return cls(
            str(Path.home()),
            str(kvd_home),
            tempfile.gettempdir(),
            user,
            socket.gethostname(),
            model,
        )

    def without(self, value: Any) -> Any:
        """Return JSON-like data in which all texts, also keys, are replaced."""
        if isinstance(value, str):
            return self._replaced(value)
        if isinstance(value, dict):
            return {self.without(key): self.without(item) for key, item in value.items()}
        return [self.without(item) for item in value] if isinstance(value, list) else value

    def _replaced(self, text: str) -> str:
        for path, short in (
            *((path, "$MODEL") for path in self.model),
            (self.kvd_home, "$KVD_HOME"),
            (self.home, "~"),
            (self.temporary, "$TMPDIR"),
        ):
            if path.strip("/"):
                text = re.sub(rf"{re.escape(path.rstrip('/'))}(?![\w.-])", short, text)
        if self.user:
            text = re.sub(rf"(?<=/){re.escape(self.user)}(?![\w.-])", "USER", text)
        for host in {self.host, self.host.partition(".")[0]}:
            if len(host) >= _LEAST_HOST:
                text = re.sub(
                    rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text, flags=re.IGNORECASE
                )
        return text

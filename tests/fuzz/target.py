"""What a fuzz target is: inputs as bytes, a corpus of files, and a check of one input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from hypothesis.strategies import SearchStrategy

CORPUS = Path(__file__).parent / "corpus"

Check = Callable[[bytes], None]
"""Runs the real code on one input; raises for anything but a typed error."""


class Target(ABC):
    """One interface that takes input from outside."""

    name: ClassVar[str]
    examples: ClassVar[int]
    """Inputs that a test run tries, in a few seconds."""

    @abstractmethod
    def inputs(self) -> SearchStrategy[bytes]:
        """Return a strategy that mutates the corpus."""

    @abstractmethod
    def checking(self) -> AbstractContextManager[Check]:
        """Start what is under test; the check is valid within the block."""

    def corpus(self) -> list[Path]:
        return sorted(file for file in (CORPUS / self.name).iterdir() if file.is_file())

    def seeds(self) -> list[bytes]:
        return [file.read_bytes() for file in self.corpus()]

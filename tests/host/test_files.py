"""The daemon raises its limit on open files."""

from __future__ import annotations

import resource

from kvd.host import files


def test_the_limit_is_raised_as_far_as_the_system_allows(monkeypatch):
    said = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: said.append(limits))
    for limits in ((256, resource.RLIM_INFINITY), (256, 1024), (9000, 9999), (1024, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        files.raise_limit()
    assert said == [(files.WANTED, resource.RLIM_INFINITY), (1024, 1024)]


def test_a_system_that_refuses_causes_no_error(monkeypatch):
    def refuses(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuses)
    files.raise_limit()
    assert files.limit() == 256

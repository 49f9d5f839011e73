"""The command `kvd`: version, help, and the environment variables of `kvd serve`."""

from __future__ import annotations

import sys

import pytest

import kvd
from kvd.__main__ import main as kvd_main


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_kvd_prints_its_version(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["kvd", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{kvd.__version__}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("version", "--help")])
def test_help_of_kvd_shows_flags_as_they_are_written(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["kvd", *arguments])
    with pytest.raises(SystemExit):
        kvd_main()
    assert "<bool>" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KVD_PORT", "70000", "70000 is no port; set 0 to 65535, or unset it"),
        ("KVD_PORT", "x", "x is no port"),
        ("KVD_BUDGET", "3", "3 B is less than the minimum of 64.0 MiB"),
    ],
)
def test_an_invalid_variable_of_kvd_is_named(monkeypatch, capsys, variable, text, message):
    monkeypatch.setenv(variable, text)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve"])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert variable in error
    assert message in error


@pytest.mark.parametrize(
    ("variable", "arguments", "port"),
    [
        ("tcp://10.96.0.7:11711", (), None),
        ("udp://10.96.0.7:11711", (), None),
        ("tcp://10.96.0.7:11711", ("--port", "8080"), 8080),
        ("8081", (), 8081),
    ],
)
def test_the_address_that_kubernetes_sets_as_the_port_is_ignored(
    monkeypatch, variable, arguments, port
):
    ports = []
    monkeypatch.setenv("KVD_PORT", variable)
    monkeypatch.setattr(kvd.__main__, "become", ports.append)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    (options,) = ports
    found = options.default_port if options.port is None else options.port
    assert (ended.value.code, found) == (0, port)


@pytest.mark.parametrize("arguments", [("--no-http",), ("--port", "1"), ("--budget", "1GiB")])
def test_a_variable_that_is_not_used_is_not_read(monkeypatch, arguments):
    started = []
    monkeypatch.setenv("KVD_BUDGET" if "--budget" in arguments else "KVD_PORT", "70000")
    monkeypatch.setattr(kvd.__main__, "become", started.append)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert (ended.value.code, len(started)) == (0, 1)


def test_an_address_as_the_option_port_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", "--port", "tcp://10.96.0.7:11711"])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert ended.value.code == 2
    assert "is not a valid integer" in " ".join(capsys.readouterr().err.replace("│", "").split())

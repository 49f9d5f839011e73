"""The KV cache options, which `kvctl load` and `kvd serve` share."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from kvd.__main__ import app as kvd_app
from kvd.cli.app import app as kvctl_app
from kvd.config.options import Options
from kvd.host.exits import Exit
from kvd.host.home import Home
from protocol.kv import KVSpec
from tests.cli.stub import stub_daemon, well

ALL = "--kv k8v4 --kv-group-size 32 --kv-value-group-size 128 --kv-schemes k8v8,k8v4,k4v4 "
ALL += "--kv-floor 0=k8v8 --kv-floor -1=k16v16 --quantized-kv-start 512 --max-kv-size 8192 "
ALL += "--kv-keep 8"


@pytest.fixture(params=["load", "serve"])
def run(request, home: Home, monkeypatch):
    """Return a function that runs one command and returns its exit code, output and settings."""

    def load(options: str):
        arguments = ["--home", str(home.root), "load", "demo", *options.split()]
        with stub_daemon(home.socket, well) as requests:
            done = CliRunner().invoke(kvctl_app, arguments, env={"COLUMNS": "400"})
        specs = [request.kv for request in requests if hasattr(request, "kv")]
        return done.exit_code, done.output, specs

    def serve(options: str):
        ran: list[Options] = []
        monkeypatch.setattr(
            os, "execve", lambda _, words, __: ran.append(Options.unpacked(words[-1]))
        )
        arguments = ["serve", "--home", str(home.root), "--model", "demo", *options.split()]
        done = CliRunner().invoke(kvd_app, arguments, env={"COLUMNS": "400"})
        return done.exit_code, done.output, [options.kv for options in ran]

    return {"load": load, "serve": serve}[request.param]


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ("", None),
        ("--kv k8v4", KVSpec(8, 4)),
        ("--kv K4V4G32", KVSpec(4, 4, group_size=32)),
        ("--max-kv-size 512", KVSpec(max_kv_size=512)),
        ("--max-kv-size 8k", KVSpec(max_kv_size=8192)),
        ("--kv-schemes none", KVSpec(schemes=())),
        (
            ALL,
            KVSpec(
                8,
                4,
                group_size=32,
                value_group_size=128,
                floors={0: "k8v8", -1: "k16v16"},
                quantized_kv_start=512,
                max_kv_size=8192,
                keep=8,
            ),
        ),
    ],
)
def test_options_become_settings(run, options: str, spec: KVSpec | None):
    code, out, specs = run(options)
    assert (code, specs) == (0, [spec]), out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--kv k7v8", "--kv 'k7v8' is no KV scheme: key bits must be one of"),
        ("--kv-group-size 16", "--kv-group-size must be one of 32, 64, not 16"),
        (
            "--kv k4v4g32 --kv-group-size 64",
            "--kv-group-size the scheme k4v4g32 sets it too; set it once",
        ),
        ("--kv-value-group-size 16", "--kv-value-group-size must be one of 32, 64, 128"),
        ("--kv-schemes k4v4,k8v8", "--kv-schemes must go down"),
        ("--kv-schemes ,", "--kv-schemes must hold KV schemes"),
        ("--kv-floor 0", "--kv-floor is not LAYER=SCHEME, such as 0=k8v8: 0"),
        ("--kv-floor 1=k8v8 --kv-floor 1=k4v4", "--kv-floor names a layer twice: 1=k4v4"),
        ("--kv-floor 99999=k8v8", "a key of --kv-floor must be at most 4095"),
        ("--kv-floor 1=k9v9", "--kv-floor must hold KV schemes, but 'k9v9' is no KV scheme"),
        ("--quantized-kv-start -1", "--quantized-kv-start must be at least 0"),
        ("--max-kv-size 255", "--max-kv-size must be at least 256"),
        ("--max-kv-size 256 --kv-keep 200", "--kv-keep must be at most 128, because"),
        ("--max-kv-size many", "--max-kv-size"),
    ],
)
def test_an_invalid_option_is_a_usage_error_that_names_it(run, options: str, message: str):
    code, out, specs = run(options)
    assert (code, specs) == (Exit.USAGE, [])
    assert message in out


def test_kv_options_without_a_model_are_refused(home: Home):
    done = CliRunner().invoke(
        kvd_app, ["serve", "--home", str(home.root), "--kv", "k4v4"], env={"COLUMNS": "400"}
    )
    assert done.exit_code == Exit.USAGE
    assert "apply only to models given with --model" in done.output

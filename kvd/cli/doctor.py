"""`kvctl doctor`: checks of this machine and home, with advice; `--selftest` runs more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import rich_click as click

from kvd.cli import completion
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.console import print_message, stdout_console, write
from kvd.cli.doctor_page import Page, summary
from kvd.doctor import report
from kvd.doctor.examination import examine
from kvd.doctor.scene import Scene
from kvd.host.exits import Exit
from kvd.host.home import locate

_STDOUT = "-"


@click.command()
@click.option("--selftest", is_flag=True, help="Also compute, serve and measure; writes a report.")
@option(
    "--model",
    "NAME|FOLDER",
    "Model that the selftest measures beside mlx-lm. Default: demo.",
    shell_complete=completion.model_sources,
)
@click.option("--quick", is_flag=True, help="Run a short selftest.")
@click.option("--service", is_flag=True, help="Let the selftest install and remove a service.")
@option(
    "--json",
    "[FILE]",
    "Print the data as JSON, or write them to a file.",
    name="target",
    is_flag=False,
    flag_value=_STDOUT,
    type=click.Path(dir_okay=False),
)
@common_options("home")
def doctor(
    common: CommonOptions,
    *,
    selftest: bool,
    model: str | None,
    quick: bool,
    service: bool,
    target: str | None,
) -> None:
    """Check this machine and home, and print advice. Exit code 1: a check failed.

    `--json FILE` writes the result to a file.
    """
    if (quick or service or model is not None) and not selftest:
        raise click.BadParameter("--quick, --service and --model need --selftest")
    printed = common.json or target == _STDOUT
    file = None if target in {None, _STDOUT} else Path(str(target))
    scene = Scene(locate(common.home))
    page = Page(None if printed else stdout_console())
    with replace(common, json=printed).guarded():
        page.head(scene)
        for section in examine(scene):
            page.add(section)
        if selftest:
            from kvd.cli import doctor_selftest  # noqa: PLC0415 - only with --selftest

            content = doctor_selftest.run(scene, page, model, file, quick=quick, service=service)
        else:
            data = {"verdict": page.verdict, "machine": scene.machine, "sections": page.sections}
            content = msgspec.json.encode(data)
            if file is not None:
                report.save(file, content + b"\n")
        if printed:
            write(content.decode().rstrip("\n") + "\n")
        else:
            print_message(summary(page.sections))
        if page.verdict == "fail":
            raise SystemExit(Exit.FAILED)

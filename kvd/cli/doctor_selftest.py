"""`kvctl doctor --selftest`: finds the model, runs the trials and writes the report."""

from __future__ import annotations

from pathlib import Path

from kvd import demo
from kvd.cli import local_models
from kvd.cli.console import format_message, print_message, stderr_console
from kvd.cli.doctor_page import Page
from kvd.config.models_dir import models_dir
from kvd.config.sources import absolute
from kvd.doctor import report, selftest
from kvd.doctor.privacy import Names
from kvd.doctor.scene import Scene
from kvd.doctor.speed import Measured, Model
from protocol import paths
from protocol.errors import UnknownModel
from protocol.model_source import EMBEDDED


def run(
    scene: Scene, page: Page, name: str | None, file: Path | None, *, quick: bool, service: bool
) -> bytes:
    """Run the selftest, write its report, and return the report's content."""
    measured, model = Measured(), find_model(scene, name or "demo")
    with stderr_console().status("selftest") as progress:
        for step in selftest.run(scene, model, measured, quick=quick, service=service):
            if isinstance(step, str):
                progress.update(format_message("selftest: {}", step))
            else:
                progress.stop()  # otherwise its line would stay above the section
                page.add(step)
                progress.start()
    if measured.speed is not None:
        page.add_speed(measured.speed)
    found = report.Report.of(scene, page.sections, measured.speed, quick=quick)
    names = Names.of_this_machine(scene.home.root, model.private_paths)
    print_message("[dim]wrote[/] {}", report.write(found, names, file))
    return found.encode(names)


def find_model(scene: Scene, name: str) -> Model:
    """Return a model by its name in the configuration, its Hub id or its folder.

    Raises `UnknownModel`: nothing is downloaded.
    """
    sources = {entry.name: entry.source for entry in scene.settings.entries}
    source = absolute(sources.get(name, name), scene.home.root)
    if source in EMBEDDED:
        return Model(source, demo.path())
    known = models_dir(scene.settings, scene.home.root).path
    for folder in (Path(source), Path(name), *([] if known is None else [known / name])):
        if paths.is_folder(folder):
            return Model(str(paths.resolved(folder)), folder)
    for local in local_models.in_hub_cache():
        if local.source == source and local.complete:
            return Model(source, local.path)
    raise UnknownModel(
        f"there is no model {name!r} on this machine; give a folder, or `kvctl pull` it first",
        model=name,
    )

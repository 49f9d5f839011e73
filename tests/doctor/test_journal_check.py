"""What doctor reports of the journal: damage that the next start skips, and the copy of it."""

from __future__ import annotations

import socket

from actors.request_journal import RequestReceived
from kvd.daemon.journal import DiskJournal
from kvd.doctor import journal
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.home import Home
from protocol.types import Sampling
from protocol.worker import Submit


def write(home: Home, *rids: str) -> dict[str, int]:
    """Open the journal as a start does, and write requests; return the sizes that it restored."""
    subject = DiskJournal(home.journal, limit_bytes=2**20, keep_s=600.0)
    for rid in rids:
        submit = Submit(rid=rid, prompt="p", sampling=Sampling(seed=1))
        assert subject.write(RequestReceived(rid, "m", submit))
    subject.close()
    return dict.fromkeys(subject.saved, 0)


def test_a_damaged_journal_and_its_copy(home: Home):
    home.create()
    scene = Scene(home)
    assert journal.records(scene).observed.startswith("no ")
    write(home, "a", "b", "c")
    path = home.journal / "requests"
    whole = journal.records(scene)
    assert (whole.verdict, whole.observed.partition(" in ")[0]) == (
        "ok",
        "3 records of an earlier daemon",
    )

    data = bytearray(path.read_bytes() + bytes(100))
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    found = journal.records(scene)
    assert found.verdict == "warn"
    assert found.numbers["damaged_records"] == 2
    assert found.advice is not None
    assert found.advice.startswith("nothing to do")
    with listen.hold_lock(home):
        assert journal.records(scene).verdict == "ok"

    assert len(write(home)) == 2
    copy = journal.records(scene)
    assert copy.verdict == "warn"
    assert "restored 2 of its records; 2 records with " in copy.observed
    assert copy.advice is not None
    assert f"rm {path}.damaged" in copy.advice
    path.with_suffix(".damaged").unlink()
    assert journal.records(scene).verdict == "ok"


def test_a_journal_that_cannot_be_read(home: Home):
    home.create()
    home.journal.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home.journal / "requests"))
        found = journal.records(Scene(home))
    assert (found.verdict, "cannot read" in found.observed) == ("fail", True)

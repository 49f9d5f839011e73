"""`kvctl explain --request`: one request's page, the list, and ids that are not known."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvd.host.home import Home
from protocol import messages as m
from protocol.cache_outcome import (
    CacheOutcome,
    CachePart,
    Difference,
    PromptPlace,
    RequestOutcome,
)
from protocol.explain_messages import ExplainedRequests, ExplainRequest
from tests.cli.stub import stub_daemon, well

PLACE = PromptPlace("message", 3, 17, "user")
OUTCOME = CacheOutcome(
    parts=[CachePart("memory", 1024), CachePart("between", 76), CachePart("differs", 5000)],
    chunk=256,
    difference=Difference(1100, PLACE, "\nnow ", "12:04\x1b[2J", "12:03"),
)
ONE = RequestOutcome(request="1.7", client_id="req_ab", model="demo", at=0.0, outcome=OUTCOME)


ODD = RequestOutcome(
    request="2.1", client_id="req_[/b]\x1b[2J", model="demo", at=0.0, outcome=OUTCOME
)


def daemon(request: m.Request) -> Iterable[m.Event | None]:
    if not isinstance(request, ExplainRequest):
        yield from well(request)
        return
    known = request.request in (None, "req_ab", "1.7")
    yield ExplainedRequests(
        id=request.id, requests=[ONE, ODD] if request.request is None else [ONE] if known else []
    )


def test_a_request_is_explained_with_the_texts_that_differ(kvctl, home: Home) -> None:
    with stub_daemon(home.socket, daemon):
        code, out, err = kvctl("explain", "--request", "req_ab")
        assert (code, err) == (0, "")
        lines = " ".join(out.split())
        assert "5,076 of 6,100 prompt tokens were computed" in lines
        assert "1,024 found in memory" in lines
        assert "at token 1,100, in message 3 of 17 (user)" in lines
        assert "this prompt '12:04\\x1b[2J' cached prompt '12:03'" in lines
        assert "\x1b[2J" not in out, "text of a prompt must not control the terminal"
        code, out, _ = kvctl("explain", "--request", "1.7", "--json")
    assert json.loads(out)["outcome"]["difference"]["place"]["number"] == 3


def test_without_an_id_the_newest_are_listed(kvctl, home: Home) -> None:
    with stub_daemon(home.socket, daemon):
        code, out, _ = kvctl("explain", "--request")
        assert code == 0
        assert {"req_ab", "2.1", "demo", "6,100", "5,076"} <= set(out.split())
        code, out, err = kvctl("explain", "--request", "nope")
        assert (code, out) == (6, "")
        assert "error: no request 'nope'" in err
        code, _, err = kvctl("explain")
    assert code == 2
    assert "give MODEL" in err


def test_a_request_of_another_model_is_refused_with_its_models_name(kvctl, home: Home) -> None:
    with stub_daemon(home.socket, daemon):
        code, out, err = kvctl("explain", "writer", "--request", "req_ab")
        assert (code, out) == (6, "")
        assert "request 'req_ab' belongs to demo, not to writer; leave the model out" in err
        code, out, _ = kvctl("explain", "demo", "--request", "req_ab")
        assert (code, "5,076 of 6,100" in " ".join(out.split())) == (0, True)
        code, out, err = kvctl("explain", "writer", "--request")
        assert (code, out, err.strip()) == (0, "", "no requests of writer so far")
        code, out, _ = kvctl("explain", "demo", "--request")
        assert {"req_ab", "2.1"} <= set(out.split())

"""Three daemons behind nginx: sessions stay, a daemon that drains or dies is replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.process.helpers import wait_for
from tests.scale.fleet import CONFIG, Fleet, fleet_of
from tests.scale.nginx import PROGRAM, nginx
from tests.scale.traffic import PATH, Stream, Streams, chat, converse_all, place_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs nginx"),
]
STREAMS = 32


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_of(CONFIG, "--fake") as it:
        yield it


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    with nginx(fleet) as it:
        yield it


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as it:
        yield it


def place(answer: httpx.Response) -> str:
    """Return the address of the daemon that answered."""
    assert answer.status_code == 200, answer.text
    return place_of(answer.headers)


def of_header(name: str):
    def ask(client: httpx.Client, session: str, turn: int) -> httpx.Response:
        return client.post(PATH, json=chat(f"turn {turn}"), headers={name: session})

    return ask


def of_fields(path: str = PATH, **base):
    """Ask with fields that depend on the session and on the turn."""

    def ask(client: httpx.Client, session: str, turn: int) -> httpx.Response:
        fields = base["fields"](session, turn)
        return client.post(path, json=fields)

    return ask


def talk(session: str, turn: int) -> list[str]:
    """Return a conversation's texts up to a turn."""
    later = [text for at in range(turn) for text in (f"answer {at}", f'"role": "user" {at}')]
    return [f'The first "message" of {session}\n', *later]


def parts(session: str, turn: int) -> dict:
    """A conversation of Anthropic's: a mark of the cache is at the newest message."""
    said = chat(*talk(session, turn))["messages"]
    for message in said:
        message["content"] = [{"type": "text", "text": message["content"]}]
    said[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
    return {"model": "fast", "messages": said, "max_tokens": 1, "system": "Be brief."}


def parts_with_text_first(session: str, turn: int) -> dict:
    body = parts(session, turn)
    for message in body["messages"]:
        (part,) = message["content"]
        message["content"] = [{"text": part["text"], "type": "text"}]
    return body


def parts_with_marks_in_the_middle(session: str, turn: int) -> dict:
    body = parts(session, turn)
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    for message in body["messages"]:
        (part,) = message["content"]
        message["content"] = [{"type": "text"} | mark | {"text": part["text"]}]
    return body


def content_first(session: str, turn: int) -> dict:
    """A conversation whose messages have ``content`` before ``role``; the system prompt changes."""
    body = chat(*talk(session, turn), system=f"It is {turn} o'clock.")
    said = [{"content": one["content"], "role": one["role"]} for one in body["messages"]]
    return body | {"messages": said}


KINDS = {
    "X-Session-Id": of_header("X-Session-Id"),
    "X-LiteLLM-Session-Id": of_header("x-litellm-session-id"),
    "X-Claude-Code-Session-Id": of_header("x-claude-code-session-id"),
    "prompt_cache_key": of_fields(
        fields=lambda session, turn: chat(f"turn {turn}", prompt_cache_key=session)
    ),
    "metadata.user_id": of_fields(
        "/v1/messages",
        fields=lambda session, turn: chat(
            f"turn {turn}", metadata={"a": "b", "user_id": '{"session_id":"' + session + '"}'}
        ),
    ),
    "first message": of_fields(
        fields=lambda session, turn: chat(*talk(session, turn), system=f"It is {turn} o'clock.")
    ),
    "first message in parts": of_fields("/v1/messages", fields=parts),
    "first message in parts, the text first": of_fields(
        "/v1/messages", fields=parts_with_text_first
    ),
    "first message in parts, marks in the middle": of_fields(
        "/v1/messages", fields=parts_with_marks_in_the_middle
    ),
    "first message, the content first": of_fields(fields=content_first),
    "list of prompts": of_fields(
        "/v1/completions",
        fields=lambda session, turn: {
            "model": "fast",
            "prompt": [f"Session {session}"],
            "max_tokens": turn + 1,
        },
    ),
    "Ollama": of_fields(
        "/api/chat",
        fields=lambda session, turn: {
            "model": "fast",
            "stream": False,
            "options": {"num_predict": 1},
            "messages": chat(*talk(session, turn))["messages"],
        },
    ),
    "input": of_fields(
        "/v1/responses",
        fields=lambda session, turn: {
            "model": "fast",
            "input": f"Session {session}",
            "max_output_tokens": turn + 1,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_stays_on_its_daemon(client: httpx.Client, kind: str):
    ask = KINDS[kind]
    places = {
        session: {place(ask(client, session, turn)) for turn in range(3)}
        for session in (f"session-{number}" for number in range(12))
    }
    assert {len(found) for found in places.values()} == {1}
    assert len(set.union(*places.values())) > 1, "all sessions are on one daemon"


def test_requests_without_a_session_stay_with_their_client(client: httpx.Client):
    assert client.get("/v1/models").json()["data"]
    assert len({place(client.get("/v1/models")) for _ in range(6)}) == 1


@pytest.mark.parametrize("order", [("role", "content"), ("content", "role")], ids=" first ".join)
@pytest.mark.parametrize("text", ["x" * 7_000_000, '\\n"{[' * 1_000_000], ids=["plain", "escapes"])
def test_a_body_up_to_kvds_limit_has_its_session(
    client: httpx.Client, text: str, order: tuple[str, str]
):
    """The search in the body must not fail or take long, whatever the body contains."""
    message = {"role": "user", "content": text}
    body = {"model": "nope", "messages": [{name: message[name] for name in order}]}
    answers = [client.post(PATH, json=body | {"seed": seed}) for seed in range(3)]
    assert {answer.status_code for answer in answers} == {404}, answers[0].text
    assert len({answer.headers["x-kvd-daemon"] for answer in answers}) == 1
    assert max(answer.elapsed.total_seconds() for answer in answers) < 30
    assert client.post(PATH, content=b" " * (8 * 2**20 + 1)).status_code == 413


def test_paths_of_single_daemons_are_not_served(client: httpx.Client):
    assert client.get("/health").json() == {"status": "ok"}
    for path in ("/", "/metrics", "/ui/stream"):
        assert client.get(path).status_code == 404
    hosts = {"Host": "evil.example"}
    assert client.get("/v1/models", headers=hosts).status_code == 403, "kvd checks the host"


def test_a_broken_model_takes_no_daemon_out_of_service(fleet: Fleet, client: httpx.Client):
    headers = {"X-Session-Id": "a session"}
    home = place(client.post(PATH, json=chat("Hi"), headers=headers))
    broken = [client.post(PATH, json=chat("Hi", model="broken"), headers=headers) for _ in range(6)]
    assert {answer.status_code for answer in broken} <= {500, 503}
    assert place(client.post(PATH, json=chat("Hi"), headers=headers)) == home
    assert all(member.ready() for member in fleet.members)


def test_a_draining_daemon_ends_its_streams_and_gets_no_others(fleet: Fleet, client: httpx.Client):
    headers = {"X-Session-Id": "drained"}
    stream = Stream(str(client.base_url), chat("Hi", model="steady", max_tokens=100), headers)
    assert stream.begun.wait(30)
    member = fleet.at(stream.place)
    draining = threading.Thread(target=member.kvctl, args=("drain",))
    draining.start()
    wait_for("the daemon drains", lambda: not member.ready())
    others = {place(client.post(PATH, json=chat("Hi"), headers=headers)) for _ in range(4)}
    assert len(others) == 1, "its sessions have one new daemon"
    assert member.place not in others
    assert client.get("/ready").status_code == 200
    draining.join(60)
    assert (stream.finished().complete, stream.error) == (True, "")
    member.signal(15)
    member.wait()
    member.launch()
    wait_for("the daemon is back", member.ready)
    wait_for(
        "its sessions are back",
        lambda: place(client.post(PATH, json=chat("Hi"), headers=headers)) == member.place,
    )


def test_if_all_daemons_drain_the_client_learns_when_to_retry(fleet: Fleet, client: httpx.Client):
    try:
        for member in fleet.members:
            assert member.kvctl("drain").returncode == 0
        refused = client.post(PATH, json=chat("Hi"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert client.get("/ready").status_code == 503
    finally:
        for member in fleet.members:
            member.signal(15)
            member.wait()
        fleet.start()
    wait_for("nginx sees them", lambda: client.get("/ready").status_code == 200)


def test_a_killed_daemon_costs_only_its_own_streams(fleet: Fleet, url: str, client: httpx.Client):
    streams = Streams.begun(url, STREAMS, model="steady", tokens=300)
    victim = streams.kill_most_used(fleet)
    lost = streams.check(victim)
    victim.wait()
    victim.launch()
    wait_for("the daemon is back", victim.ready)
    wait_for(
        "its sessions are back",
        lambda: place(client.post(PATH, json=chat("Hi"), headers=lost[0].headers)) == victim.place,
    )


def test_a_whole_answer_survives_the_death_of_its_daemon(fleet: Fleet, client: httpx.Client):
    """Before the first byte of an answer the request is repeated."""
    headers = {"X-Session-Id": "whole"}
    victim = fleet.at(place(client.post(PATH, json=chat("Hi"), headers=headers)))
    body = chat("Count", model="steady", max_tokens=50)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, PATH, json=body, headers=headers)
        wait_for("it runs", lambda: victim.running("steady") == 1)
        victim.signal(9)
        done = answer.result(60)
    assert done.headers["x-kvd-daemon"].startswith(f"{victim.place}, ")
    assert place(done) != victim.place
    assert done.json()["usage"]["completion_tokens"] == 50
    victim.wait()
    victim.launch()
    wait_for("the daemon is back", victim.ready)


def test_prefixes_are_found_as_often_as_in_one_daemon(fleet: Fleet, client: httpx.Client):
    with httpx.Client(base_url=f"http://{fleet.members[0].place}", timeout=60) as one:
        single = converse_all(one, "single")
    several = converse_all(client, "several")
    assert single.rate > 0.5
    assert several.rate >= 0.95 * single.rate, (several, single)

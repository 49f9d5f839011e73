"""The web page in headless Chromium, with real models under memory pressure.

``KVD_PICTURES=FOLDER`` writes the pictures of docs/page.md.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from kvd.http import keys
from tests.page.chromium import Page
from tests.page.conftest import AXE, LONG, Visit, press

pytestmark = [pytest.mark.mlx, pytest.mark.process, pytest.mark.slow]

PICTURES = os.environ.get("KVD_PICTURES")
WEATHER = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Oslo"]}},
                    "required": ["city"],
                },
            },
        }
    ]
)
WIDTHS = {1280: 900, 360: 780}
FITS = "document.documentElement.scrollWidth <= innerWidth"


def row(name: str) -> str:
    return f"tr[data-key={json.dumps(name)}]"


def shows(selector: str, text: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})"


# Keeps each text of the legend in `window.legends`: a level is in it for as long as rows have it.
KEEP_LEGENDS = """
window.legends = [];
const all = {childList: true, subtree: true, characterData: true};
const legend = document.querySelector("#legend");
new MutationObserver(() => window.legends.push(legend.textContent)).observe(legend, all);
0
"""


def check_access(page: Page) -> None:
    """Fail with what axe-core finds in the visible page, in both color schemes.

    Without axe-core nothing is checked, and `test_axe_is_installed` is skipped.
    """
    if not AXE.is_file():
        return
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        if not page.js("'axe' in window"):
            page.js(AXE.read_text(encoding="utf-8") + "; 0")
        found = page.js(
            "axe.run().then(r => JSON.stringify(r.violations.map(v =>"
            " [v.id, v.help, v.nodes.map(n => n.html + ' ' + n.failureSummary)])))"
        )
        assert json.loads(found) == [], scheme
    page.scheme("light")


def test_axe_is_installed() -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (`make axe`, which needs npm)")


def take_pictures(page: Page, name: str) -> None:
    """Check that nothing overflows at both widths, and write the pictures if asked."""
    for width, height in WIDTHS.items():
        page.resize(width, height)
        page.wait(FITS)
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            if PICTURES:
                page.js("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
                page.picture(Path(PICTURES) / f"page-{name}-{width}-{scheme}.png")
    page.resize(1280)
    page.scheme("light")


def test_the_keyboard_reaches_everything(visit: Visit):
    page = visit.open()
    page.wait(shows(row("demo"), "ready"))
    names = []
    for _ in range(40):
        page.press("Tab")
        names.append(
            page.js(
                "(e => e === document.body ? '' : (e.getAttribute('aria-label') ||"
                " e.labels?.[0]?.innerText || e.innerText || e.id).trim()"
                " + (e.matches(':focus-visible') ? '' : ' without focus ring'))"
                "(document.activeElement)"
            )
        )
        if names[-1] == "":
            break
    wanted = [
        *("Skip to content", "Overview", "Requests", "Chat", "Show"),
        *("demo", "Unload demo", "Pin demo", LONG, f"Load {LONG}", "writer", "Load writer", "of"),
    ]
    assert [name for name in names if name in wanted] == sorted(wanted, key=names.index)
    assert set(wanted) <= set(names)
    assert not [name for name in names if "without" in name]
    # Enter operates the button that has the focus, and the focus stays there.
    page.js(f"document.querySelector({json.dumps(row('demo') + ' .pin')}).focus()")
    page.press("Enter")
    page.wait(shows(row("demo"), "pinned"))
    assert page.js("document.activeElement.innerText") == "Unpin"
    page.press("Space")
    page.wait(f"!{shows(row('demo'), 'pinned')}")
    assert not visit.daemon.model("demo").pinned


def test_models_are_loaded_changed_and_unloaded(visit: Visit):
    page = visit.open()
    page.click(f"{row('writer')} .load")
    page.wait(shows(row("writer"), "ready"))
    page.wait(shows("#bar", "writer"))
    page.click(f"{row('writer')} .link")
    page.wait("document.querySelector('#settings').open")
    assert "14.0 M" not in page.text("#settings-facts")
    assert "Context" in page.text("#settings-facts")
    check_access(page)
    page.js("document.querySelector('#settings-priority').value = '5'")
    page.js("document.querySelector('#settings-ttl').value = '900'")
    page.click("#settings-pinned")
    page.press("Enter")  # the form's own button
    page.wait("!document.querySelector('#settings').open")
    model = visit.daemon.model("writer")
    assert (model.priority, model.idle_ttl_s, model.pinned) == (5, 900, True)
    page.wait(shows(row("writer"), "pinned"))
    page.click(f"{row('writer')} .link")
    page.wait("document.querySelector('#settings-ttl').value === '900'")
    page.press("Escape")
    page.wait("!document.querySelector('#settings').open")
    page.click(f"{row('writer')} .load")
    page.wait(shows(row("writer"), "unloaded"))
    assert page.js(f"document.querySelector({json.dumps(row('writer') + ' .load')}).innerText") == (
        "Load"
    )


def test_the_settings_of_an_unloaded_model_cannot_be_overwritten(visit: Visit):
    page = visit.open()
    page.wait(shows(row(LONG), "unloaded"))
    page.click(f"{row(LONG)} .link")
    page.wait("document.querySelector('#settings').open")
    for part in ("policy", "save", "force"):
        assert page.js(f"document.querySelector('#settings-{part}').hidden"), part
    page.press("Escape")
    page.wait("!document.querySelector('#settings').open")


def test_models_may_have_the_names_of_properties_of_javascript_objects(visit: Visit):
    names = ("constructor", "__proto__")
    page = visit.open()
    with visit.daemon.client() as kvd:
        for name in names:
            kvd.load("demo", alias=name).result  # noqa: B018 - waits
        for name in names:
            list(kvd.generate(name, "A file", max_tokens=2))
        for name in names:
            page.wait(shows(row(name), "ready"))
            page.wait(
                f"/\\d ms|\\d s/.test(document.querySelector({json.dumps(row(name))})"
                ".querySelector('.first').innerText)"
            )
            page.wait(shows("#bar", name))
            page.wait(shows("#chart-values", f"{name} "))
            assert name in page.js("document.querySelector('#chart').getAttribute('aria-label')")
        assert "NaN" not in page.text("main")
        for name in names:
            kvd.unload(name)
        kvd.load("demo").result  # noqa: B018 - it may have made room
    page.wait("document.querySelectorAll('#models tbody tr').length === 3")


def test_a_chat_streams_stops_and_calls_tools(visit: Visit):
    page = visit.open("chat")
    page.js("document.querySelector('#chat-input').focus()")
    page.type("How do I rename a file in Linux?")
    page.press("Enter")
    page.wait(shows(".message.user", "rename a file"))
    page.wait("document.querySelector('.message.assistant > .text').innerText.length > 5")
    page.wait(shows(".foot", "from cache"))
    check_access(page)
    # A long answer is stopped while it is written.
    page.js("document.querySelector('#chat-tokens').value = '8000'")
    page.js("document.querySelector('#chat-temperature').value = '1.5'")
    page.js("document.querySelector('#chat-input').focus()")
    page.type("Write a very long story about a file.")
    page.press("Enter")
    # It is drawn at random: seldom it is over after a few tokens.
    text = "document.querySelectorAll('.message.assistant > .text')[1]?.innerText.length > 5"
    over = "document.querySelectorAll('.foot')[1]?.innerText.includes('from cache')"
    page.wait(f"{text} || {over}")
    page.press("Escape")
    page.wait("document.querySelector('#chat-stop').hidden")
    visit.daemon.wait_idle("demo")
    # A call is shown with its arguments, and its result continues the conversation.
    page.click("#chat-new")
    page.click("details.more summary")
    page.js(f"document.querySelector('#chat-tools').value = {json.dumps('{' + WEATHER)}")
    page.js("document.querySelector('#chat-choice').value = 'required'")
    page.js("document.querySelector('#chat-tokens').value = '128'")
    page.js("document.querySelector('#chat-temperature').value = '0'")
    page.js("document.querySelector('#chat-input').focus()")
    page.type("How is the weather in Oslo?")
    page.press("Enter")
    page.wait(shows("#chat-tools-error", "Tools:"))
    page.js(f"document.querySelector('#chat-tools').value = {json.dumps(WEATHER)}")
    page.js("document.querySelector('#chat-input').focus()")
    page.press("Enter")
    page.wait(shows(".call", "calls weather"))
    page.wait(shows(".foot", "tool_calls"))
    assert json.loads(page.text(".call code")) == {"city": "Oslo"}
    page.js("document.querySelector('#chat-choice').value = 'none'")
    page.wait("document.querySelector('.results textarea') !== null")  # after the end of the stream
    page.js("document.querySelector('.results textarea').focus()")
    page.type('{"weather": "rain"}')
    page.click(".results button")
    page.wait("document.querySelectorAll('.message.assistant').length === 2")
    page.wait("document.querySelector('#chat-stop').hidden")
    assert "rain" in page.text(".message.tool")
    assert page.text(".message.assistant:last-of-type > .text") == "The weather is rain."
    page.click("details.more summary")
    take_pictures(page, "chat")


def test_a_new_chat_drops_what_was_being_written(visit: Visit):
    page = visit.open("chat")
    page.js(
        "window.sent = []; const send = window.fetch;"
        " window.fetch = (path, options) => { window.sent.push([path, options.body]);"
        " return send(path, options); }; 0"
    )
    page.js("document.querySelector('#chat-tokens').value = '8000'")
    page.js("document.querySelector('#chat-temperature').value = '1.5'")
    page.js("document.querySelector('#chat-input').focus()")
    page.type("Write a very long story about a file.")
    page.press("Enter")
    page.wait("document.querySelector('.message.assistant > .text')?.innerText.length > 5")
    page.click("#chat-new")
    page.wait("document.querySelector('#chat-stop').hidden")
    visit.daemon.wait_idle("demo")
    page.js("document.querySelector('#chat-tokens').value = '4'")
    page.js("document.querySelector('#chat-input').focus()")
    page.type("Hello")
    page.press("Enter")
    page.wait(shows(".foot", "from cache"))
    bodies = [json.loads(body) for path, body in page.js("window.sent") if "/chat/" in path]
    assert [len(body["messages"]) for body in bodies] == [1, 1]


def test_pressure_is_explained(visit: Visit):
    page = visit.open()
    page.js("location.hash = 'requests'")
    page.wait(shows("#requests-empty", "No requests"))
    page.js(KEEP_LEGENDS)
    threads = press(visit.daemon, 24 * 2**20, tokens=400)
    page.wait(shows("#requests", "running"))
    page.js("location.hash = 'overview'")
    page.wait("document.querySelectorAll('#events li').length > 3")
    page.wait(shows("#events", "reclaim precision"))
    page.wait(shows("#events", "requests of"))
    page.wait("window.legends.some(text => /k[48]v4/.test(text))")
    take_pictures(page, "overview")
    check_access(page)
    page.js("location.hash = 'requests'")
    take_pictures(page, "requests")
    check_access(page)
    for thread in threads:
        thread.join()
    page.wait("document.querySelectorAll('#requests .s-length').length >= 8")
    cached = "[...document.querySelectorAll('#requests .s-length ~ .cache')]"
    page.wait(f"{cached}.every(e => e.innerText.includes(' / '))")
    page.wait(shows("#requests .levels", "k"))
    page.wait(shows("#requests .miss", "prompt tokens were computed"))
    rid = page.js("document.querySelector('#requests .s-length').closest('tr').dataset.key")
    page.js("location.hash = 'overview'")
    reason = f"request {rid}: its text"
    record = {"seq": 1, "at": 1, "kind": "malformed_call", "model": "demo", "reason": reason}
    page.js(f"import('/ui/events.js').then(m => new m.Events().add([{json.dumps(record)}], []))")
    page.click(f'#events a[href="#requests/{rid}"]')
    page.wait(f"document.querySelector('#requests .found').dataset.key === {json.dumps(rid)}")


def test_a_key_is_asked_for_and_kept_until_the_tab_closes(visit: Visit):
    key = keys.make()
    with visit.daemon.client() as kvd:
        kvd.configure(settings={"http.keys.me": keys.hashed(key)})
    page = visit.page
    page.open("about:blank")
    page.open(f"{visit.url}/#overview")
    page.wait("!document.querySelector('#key').hidden")
    check_access(page)
    assert page.js("document.activeElement.id") == "key-input"
    page.type("kvd-wrong")
    page.press("Enter")
    page.wait(shows("#key-error", "unknown"))
    page.type(key)
    page.press("Enter")
    page.wait("!document.querySelector('#views').hidden")
    visit.open()
    page.click("#forget")
    page.wait("!document.querySelector('#key').hidden")
    page.open("about:blank")
    with visit.daemon.client() as kvd:
        kvd.configure(settings={"http.keys.me": None})
    visit.caused.append("401")


def test_the_page_connects_again_after_a_kill(visit: Visit):
    page = visit.open()
    before = visit.daemon.pid
    page.wait(shows("#daemon", str(before)))
    visit.daemon.signal(signal.SIGKILL)
    visit.daemon.wait()
    page.wait(shows("#connection", "does not answer"))
    assert page.js("document.body.classList.contains('stale')")
    check_access(page)
    visit.daemon.start()
    page.wait(shows("#daemon", str(visit.daemon.pid)))
    page.wait("document.querySelector('#connection').hidden")
    assert visit.daemon.pid != before
    visit.caused.append("ERR_")

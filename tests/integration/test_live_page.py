"""The live page in a real browser, on a server with a tiny model: chats that stream, and the engine at work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, Page
from commands import folder  # noqa: F401
from live_server import Gate, LiveServer, serving
from serving import running
from waiting import until

from infer import LLM
from infer.engine.draft import MAX_DRAFTS, Speculation

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed"),
    pytest.mark.usefixtures("compiled"),  # nothing waits for a compiler
]

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\u202e",
    "&lt;b&gt;",
]
SYSTEM = "YOU ARE A CAREFUL TEACHER. SAY WHERE YOU ARE NOT SURE."
Show = Callable[..., Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    with pytest.MonkeyPatch.context() as patch:
        yield Gate(patch)


@pytest.fixture(scope="module")
def server(gate: Gate) -> Iterator[LiveServer]:
    with serving() as server:
        yield server


@pytest.fixture
def show(browser: Browser, server: LiveServer) -> Iterator[Show]:
    """A page on an engine at rest that remembers nothing."""
    server.api.bodies.clear()
    server.api.replies = []
    server.llm.between_steps(lambda _: server.llm.memory.index.clear()).result()

    @contextmanager
    def show(**media: str) -> Iterator[Page]:
        with browser.page(server.address, **media) as page:
            page.wait("'live' in document.documentElement.dataset")
            yield page

    yield show
    until(lambda: server.llm.stats().running + server.llm.stats().waiting == 0)
    until(lambda: server.live._num_viewers == 0)


def assert_clean(page: Page, server: LiveServer) -> None:
    """No error, nothing that the policy had to refuse, and no request to anybody else."""
    assert page.problems() == []
    assert all(url.startswith(server.address) or url == "about:blank" for url in page.requests())


def text_of(page: Page, selector: str) -> str:
    """All that matches, hidden or not."""
    found: str = page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent).join('')")
    return found


def say(page: Page, text: str) -> None:
    page.js("document.querySelector('#draft').focus()")
    page.type(text)
    page.press("Enter")


def set_value(page: Page, selector: str, value: object) -> None:
    page.js(
        f"(() => {{ const e = document.querySelector('{selector}'); e.value = {json.dumps(str(value))};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


IDLE = "document.querySelector('#send').textContent === 'Send'"


def test_a_chat(show: Show, server: LiveServer, gate: Gate) -> None:
    """Tokens come one by one, each with its alternatives; the next turn holds all messages so far."""
    with show() as page:
        assert "tiny" in page.text("#model")
        set_value(page, "#system", SYSTEM)
        set_value(page, "#max-tokens", 40)
        set_value(page, "#seed", 3)
        set_value(page, "#temperature", 1)
        with gate.held():
            say(page, "HELLO")
            gate.let(4)
            page.wait("document.querySelectorAll('.token').length === 4")
            assert not page.js(IDLE), "it streams"
        page.wait(IDLE)
        (body,) = server.api.bodies
        assert body["messages"] == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "HELLO"}]
        assert (body["max_tokens"], body["seed"], body["temperature"]) == (40, 3, 1)
        assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True, "include_request": True})
        assert (body["logprobs"], body["top_logprobs"]) == (True, 5)
        expected = server.llm.generate(body["messages"], max_new_tokens=40, temperature=1.0, seed=3, logprobs=5)
        assert text_of(page, ".assistant .text") == expected.text
        assert page.js("document.querySelectorAll('.token').length") == 40
        meta = r"\d+ prompt tokens · 40 generated · first token after .* tokens per second · ended by"
        assert re.match(meta, page.text(".meta"))

        page.hover(".token")
        assert expected.logprobs is not None
        top = [server.llm.tokenizer.decode([token]) for token, _ in expected.logprobs[0].top]
        shown = page.js("[...document.querySelectorAll('#tip .name')].map(e => e.textContent)")
        assert [each.replace("·", " ") for each in shown[:5]] == top
        tint = "getComputedStyle(document.querySelectorAll('.token')[{}]).backgroundColor"
        likely = [each.logprob for each in expected.logprobs]
        least, most = likely.index(min(likely)), likely.index(max(likely))
        assert page.js(tint.format(least)) != page.js(tint.format(most))

        say(page, "AGAIN")
        page.wait(f"document.querySelectorAll('.assistant').length === 2 && {IDLE}")
        roles = [message["role"] for message in server.api.bodies[1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        assert server.api.bodies[1]["messages"][2]["content"] == expected.text
        assert "cached)" in text_of(page, ".meta")
        assert_clean(page, server)


def test_stop(show: Show, server: LiveServer, gate: Gate) -> None:
    with show() as page, gate.held():
        set_value(page, "#max-tokens", 1500)
        for stop in (lambda: page.click("#send"), lambda: page.press("Escape")):
            before = page.js("document.querySelectorAll('.token').length")
            say(page, "HELLO")
            gate.let(4)
            page.wait(f"document.querySelectorAll('.token').length === {before} + 4")
            assert "Stop" in page.text("#send")
            stop()
            page.wait(IDLE)
            until(lambda: server.llm.stats().running == 0)
        assert text_of(page, ".meta") == "Stopped.Stopped."
        page.wait("[...document.querySelectorAll('.lane .word')].some(e => e.textContent === 'stopped')")
        assert_clean(page, server)


def test_two_chats_share_their_beginning(show: Show, server: LiveServer, gate: Gate) -> None:
    with show() as page, gate.held():
        set_value(page, "#system", SYSTEM)
        set_value(page, "#max-tokens", 300)
        say(page, "ONE")
        gate.let(4)
        page.wait("document.querySelectorAll('.token').length === 4")
        page.wait("engine.pool.own > 0")
        assert page.js("engine.pool.shared") == 0
        page.click("#new")
        assert page.js("document.querySelector('#system').value") == SYSTEM, "as in the chat before"
        say(page, "TWO")
        page.wait("engine.stats.waiting === 1")
        gate.let(4)
        page.wait("document.querySelectorAll('.token').length === 4")
        page.wait("engine.pool.shared > 0")
        assert page.js("engine.pool.shared") == len(server.llm.encode([{"role": "system", "content": SYSTEM}])) // 8
        page.wait("$('n-shared').textContent === String(engine.pool.shared)")
        page.wait("$('pool').getAttribute('aria-label').includes(`${engine.pool.shared} shared by several requests`)")
        page.wait("$('running').textContent.includes('2 running')")
        page.wait("$('lanes').textContent.includes('cached)')")
        page.wait("document.querySelectorAll('.tab.busy').length === 2")
        colors = "new Set([...document.querySelectorAll('.tab i')].map(e => getComputedStyle(e).backgroundColor))"
        page.wait(f"{colors}.size === 2")  # each chat has the color of its request
        # Free pages, one color for each chat, one for the pages that they share.
        page.wait("new Set(cells).size >= 4")
        page.click(".tab")
        page.click("#send")
        page.wait(IDLE)
        page.wait("engine.pool.shared === 0 && engine.pool.kept > 0")
        page.click("#close")
        assert page.js("chats.length") == 1
        page.click("#send")
        page.wait(f"{IDLE} && engine.pool.own === 0")
        assert_clean(page, server)


def test_four_at_once(show: Show, server: LiveServer, gate: Gate) -> None:
    with show() as page:
        set_value(page, "#max-tokens", 30)
        page.js("document.querySelector('#draft').focus()")
        page.type("A QUESTION THAT FOUR HAVE")
        with gate.held():
            page.click("#many")
            page.wait("engine.stats.waiting === 4")
            gate.let(2)
            page.wait("engine.stats.running === 4")
        page.wait("chats.length === 4 && chats.every(chat => !chat.abort)")
        page.wait("[...document.querySelectorAll('.lane:not(.none)')].length >= 4")
        assert all(page.js("chats.map(chat => chat.messages[1].text.length)"))
        assert page.js("engine.passes.some(([, , , rows]) => rows.length === 4)")
        assert page.text("#speed") != "0"
        assert page.text("#first").endswith("s")
        assert_clean(page, server)


def test_drafts(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is shown once there are any; a pass that verifies some is not drawn as one of a prompt."""
    monkeypatch.setattr(Speculation, "_worth", lambda *_: (0.0, MAX_DRAFTS))  # as many as possible
    with serving(speculate="ngram") as server, browser.page(server.address) as page:
        page.wait("'live' in document.documentElement.dataset")
        right = server.llm.generate("HELLO", max_new_tokens=24, draft=False).token_ids
        page.wait("engine.stats.finished === 1")
        assert page.text("#decode") == "decode, one token per pass"
        server.llm.generate("HELLO", max_new_tokens=24, draft=right)
        server.llm.generate("HELLO", max_new_tokens=24, draft=[*right[:5], (right[5] + 1) % 64, *right[6:]])
        stats = server.llm.stats()
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        page.wait("engine.stats.finished === 3")
        page.wait("[...engine.requests.values()].every(each => each.state === 'ended')")
        assert page.text("#decode") == f"decode, drafts {stats.accepted_tokens} of {stats.drafted_tokens} right"
        rows = "engine.passes.flatMap(([s, l, n, rows]) => rows.map(([id, tokens]) => [s + l / 2, n, id, tokens]))"
        assert page.js(f"{rows}.filter(([, n, , tokens]) => tokens > n).length") > 3
        drawn = page.js(f"{rows}.filter(row => prefills(...row)).map(row => row[2])")
        assert drawn == [0], "the others find their prompt in the cache"
        assert_clean(page, server)


def test_pause(show: Show, server: LiveServer) -> None:
    """Then nobody listens; and all is there again afterwards."""
    with show() as page:
        page.click("#pause")
        assert "paused" in page.text("#status")
        until(lambda: server.live._num_viewers == 0)
        set_value(page, "#max-tokens", 5)
        before = page.js("[engine.stats.finished, document.querySelector('#lanes').textContent]")
        say(page, "HELLO")
        page.wait(IDLE)
        finished = server.llm.stats().finished
        assert page.js("[engine.stats.finished, document.querySelector('#lanes').textContent]") == before
        assert finished == before[0] + 1
        page.click("#pause")
        page.wait(f"engine.stats.finished === {finished}")
        assert page.text("#status") == "live"
        assert_clean(page, server)


def test_keyboard_only(show: Show, server: LiveServer) -> None:
    """Write, send, go through tokens and tabs, point at a lane: each with a focus that can be seen."""
    with show() as page:
        set_value(page, "#max-tokens", 12)
        page.js("document.querySelector('#log').focus()")
        for name in ("shade", "draft"):
            page.press("Tab")
            assert page.js("document.activeElement.id") == name
        page.type("HELLO")
        page.press("Enter")
        page.wait(f"{IDLE} && document.querySelectorAll('.token').length === 12")
        page.js("document.querySelector('#log').focus()")
        page.press("Tab")
        for key, at in [("ArrowRight", 1), ("End", 11), ("ArrowRight", 11), ("ArrowLeft", 10), ("Home", 0)]:
            page.press(key)
            assert page.js("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == at
            assert page.text("#tip") != ""
            assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert page.js("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
        page.press("Escape")
        assert page.text("#tip") == ""
        page.js("document.querySelector('#new').focus()")
        page.press("Enter")
        assert page.js("document.activeElement.id") == "draft"
        page.js("document.querySelector('[role=tab][aria-selected=true]').focus()")
        page.press("ArrowLeft")
        assert page.js("document.activeElement.textContent") == "Chat 1"
        assert page.js("document.activeElement.getAttribute('aria-selected')") == "true"
        page.js("document.querySelector('.lane:not(.none)').focus()")
        assert page.js("pointed") is not None
        page.press("Enter")
        assert page.js("document.activeElement.getAttribute('aria-pressed')") == "true"
        # Whatever can be reached has a name.
        unnamed = page.js(
            "[...document.querySelectorAll('button:not(.none), input, select, textarea, canvas')].filter(e =>"
            " !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.id)"
        )
        assert unnamed == []
        assert_clean(page, server)


def offline(page: Page, on: bool) -> None:
    unlimited = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.send("Network.emulateNetworkConditions", offline=on, **unlimited)


def test_errors_are_told_in_words(show: Show, server: LiveServer) -> None:
    with show() as page:
        set_value(page, "#max-tokens", 99999)
        say(page, "HELLO")
        page.wait(IDLE)
        assert "exceed the model's context of 2048" in page.text(".error")
        offline(page, True)
        say(page, "HELLO")
        page.wait("document.querySelectorAll('.error').length === 2")
        assert "The server does not answer" in text_of(page, ".error")
        page.js("connect()")
        page.wait("document.querySelector('#status').dataset.state === 'wrong'")
        offline(page, False)
        page.wait("document.querySelector('#status').dataset.state === 'live'")
        set_value(page, "#max-tokens", 3)
        say(page, "HELLO")
        page.wait("document.querySelectorAll('.token').length === 3")


def test_hostile_text_is_shown_as_text(show: Show, server: LiveServer) -> None:
    server.api.replies = HOSTILE
    with show() as page:
        set_value(page, "#max-tokens", 8)
        say(page, HOSTILE[0])
        page.wait(IDLE)
        shown = text_of(page, ".assistant .text")
        assert shown.startswith(HOSTILE[0] + HOSTILE[1] + "U+202E" + HOSTILE[3])
        assert text_of(page, ".user .text") == HOSTILE[0]
        page.hover(".token")
        assert page.js("window.hacked") is None
        assert page.js("document.querySelectorAll('img').length") == 0
        say(page, "X")
        page.wait(f"document.querySelectorAll('.assistant').length === 2 && {IDLE}")
        assert server.api.bodies[1]["messages"][1]["content"].startswith("".join(HOSTILE)), "as the model wrote it"
        assert_clean(page, server)


MARKDOWN = [
    *(
        "# A **",
        "title",
        "**\n\n",
        "Some *",
        "slanted* and `",
        "x * y",
        "` and 2 * 3 * 4",
        ".\n",
        "- one\n- ",
        "**two**\n",
    ),
    *(
        "1. three\n",
        "> four\n",
        "```py\n",
        "<b>**no**\n",
        "```\n",
        "[a](javascript:hacked=1) <img src=x onerror='hacked=1'>",
    ),
]


def test_markdown(show: Show, server: LiveServer, gate: Gate) -> None:
    """Its marks are hidden once tokens are no longer shaded; all characters stay in the page."""
    server.api.replies = MARKDOWN
    with show() as page:
        set_value(page, "#max-tokens", len(MARKDOWN))
        with gate.held():
            say(page, "HELLO")
            gate.let(2)
            page.wait("document.querySelectorAll('.token').length === 2")
            assert page.js("document.querySelector('.heading').textContent") == "# A **title", "not closed yet"
        page.wait(IDLE)
        page.wait(f"document.querySelectorAll('.token').length === {len(MARKDOWN)}")
        assert text_of(page, ".assistant .text") == "".join(MARKDOWN)
        for selector, text in {
            ".heading[role=heading][aria-level='1'] strong": "title",
            "em": "slanted",
            "code": "x * y",
            ".dot strong": "two",
            ".item:not(.dot)": "1. three\n",
            ".quote": "> four\n",
            ".code": "```py\n<b>**no**\n```\n",
        }.items():
            assert text_of(page, f".assistant {selector}").replace("\n", "") == text.replace("\n", ""), selector
        paragraph = "document.querySelector('.paragraph').innerText.trim()"
        assert page.js(paragraph) == "Some *slanted* and `x * y` and 2 * 3 * 4."
        tint = "getComputedStyle(document.querySelectorAll('.token')[1]).backgroundColor"
        shaded = page.js(tint)
        page.click("#shade")
        assert page.js(paragraph) == "Some slanted and x * y and 2 * 3 * 4."
        assert page.js("document.querySelector('.code').innerText.trim()") == "<b>**no**"
        assert page.js(tint) == "rgba(0, 0, 0, 0)" != shaded
        assert text_of(page, ".assistant .text") == "".join(MARKDOWN)
        assert page.js("window.hacked") is None
        assert page.js("document.querySelectorAll('.assistant :is(a, img, b)').length") == 0
        page.hover(".dot strong .token, .dot strong .rest")
        assert "likely" in page.text("#tip")
        page.click("#shade")
        assert page.js(tint) == shaded
        assert_clean(page, server)


@pytest.mark.parametrize(
    "text",
    [
        "*" * 999,
        "**a " * 300,
        "*a**b" * 300,
        "_*_**_`" * 300,
        "`" * 99 + "a",
        "\n\n- *\n```\n" * 99,
        "a\n\nb",
        " - a\n\t",
        "`` ` ``",
    ],
)
def test_markdown_loses_nothing(show: Show, text: str) -> None:
    """The parts of the blocks follow each other, from the beginning of a text to its end, however it is cut off."""
    with show() as page:
        gaps = (
            f"[...Array(9).keys()].flatMap(cut => {{ const text = {json.dumps(text)}.slice(0, -cut || undefined);"
            " const ends = blocksOf(text).flatMap(block => block.parts.flatMap(([, start, end]) => [start, end]));"
            " return [0, ...ends, text.length].filter((end, i, all) => i % 2 === 0 && end !== all[i + 1]); })"
        )
        assert page.js(gaps) == []


@pytest.mark.parametrize("allowed", [True, False])
def test_copy(show: Show, server: LiveServer, allowed: bool) -> None:
    """As the model wrote it; also where the browser refuses pages the clipboard."""
    server.api.replies = ["**a**\n", "\n", "- b"]
    with show() as page:
        page.js(
            f"navigator.clipboard.writeText = async (text) => {{ if (!{json.dumps(allowed)}) throw Error();"
            " copied = text; };"
            "addEventListener('copy', () => { copied = document.activeElement.value; })"
        )
        set_value(page, "#max-tokens", 3)
        say(page, "HELLO")
        page.wait(f"{IDLE} && !document.querySelector('.copy').hidden")
        page.js(
            "window.shownLabels = []; "
            "new MutationObserver(() => shownLabels.push(document.querySelector('.copy').textContent))"
            ".observe(document.querySelector('.copy'), {childList: true, characterData: true, subtree: true})"
        )
        page.click(".copy")
        page.wait("shownLabels.includes('Copied')")  # it is shown for a moment
        assert page.js("copied") == "**a**\n\n- b"
        assert_clean(page, server)


def luminance(page: Page, selector: str, name: str) -> float:
    """Of a colour, from 0 to 1, roughly."""
    values = re.findall(r"[\d.]+", page.style(selector, name))
    return sum(map(float, values[:3])) / (3 * 255)


@pytest.mark.parametrize(("scheme", "other"), [("light", "dark"), ("dark", "light")])
def test_light_and_dark(show: Show, server: LiveServer, scheme: str, other: str) -> None:
    with show(prefers_color_scheme=scheme, prefers_reduced_motion="reduce") as page:
        page.wait("!poolDrawing.dirty")
        before = page.js("$('pool').toDataURL()")
        paper, ink = luminance(page, "body", "backgroundColor"), luminance(page, "body", "color")
        assert (paper > ink) == (scheme == "light")
        assert abs(paper - ink) > 0.6
        assert other.title() in page.text("#theme")
        page.click("#theme")
        assert (luminance(page, "body", "backgroundColor") > 0.5) == (scheme == "dark")
        page.wait("!poolDrawing.dirty")
        assert page.js("$('pool').toDataURL()") != before
        assert_clean(page, server)


@pytest.mark.parametrize("size", [(360, 740), (768, 1024), (1280, 800), (1920, 1080)])
def test_sizes(show: Show, server: LiveServer, size: tuple[int, int]) -> None:
    """Nothing scrolls sideways, nothing moves while an answer comes, and a wide screen shows all at once."""
    with show() as page:
        page.size(*size)
        set_value(page, "#max-tokens", 60)
        places = (
            "JSON.stringify(['engine', 'pool-card', 'lanes-box', 'composer'].map(id => $(id).getBoundingClientRect()))"
        )
        before = page.js(places)
        say(page, "X" * 200)
        page.wait("document.querySelectorAll('.token').length > 10 && engine.passes.length > 10")
        page.js("scrollTo(0, 0)")
        assert page.js(places) == before
        assert page.js("document.documentElement.scrollWidth") <= size[0]
        if size[0] > 1000:
            assert page.js("document.documentElement.scrollHeight") <= size[1]
            assert page.js("$('engine').scrollHeight - $('engine').clientHeight") <= 0
        page.wait(IDLE)
        assert_clean(page, server)


def test_a_model_without_a_chat_template(browser: Browser) -> None:
    """It goes on with what was written, and with its own text."""
    with serving(chat=False) as server, browser.page(server.address) as page:
        assert "no chat template" in page.text("#model")
        assert not page.js("document.querySelector('#system').checkVisibility()")
        set_value(page, "#max-tokens", 6)
        say(page, "ONCE UPON")
        page.wait(f"document.querySelectorAll('.token').length === 6 && {IDLE}")
        text = text_of(page, ".assistant .text")
        say(page, " A TIME")
        page.wait(f"document.querySelectorAll('.token').length === 12 && {IDLE}")
        assert [body["prompt"] for body in server.api.bodies] == ["ONCE UPON", f"ONCE UPON{text} A TIME"]
        assert all(body["logprobs"] == 5 for body in server.api.bodies)
        assert_clean(page, server)


def test_on_the_real_server(browser: Browser, folder: Path) -> None:  # noqa: F811
    """The page and the API as `infer serve` has them."""
    with (
        running(lambda: LLM(folder, cache_memory=10**6)) as server,
        browser.page(server.url) as page,
    ):
        page.wait("'live' in document.documentElement.dataset")
        assert "tiny" in page.text("#model")
        set_value(page, "#max-tokens", 24)
        set_value(page, "#temperature", 0)
        say(page, "hello")
        page.wait(f"{IDLE} && document.querySelectorAll('.token').length > 0")
        expected = server.service.llm.generate([{"role": "user", "content": "hello"}], max_new_tokens=24)
        assert text_of(page, ".token") == expected.text
        page.wait("document.querySelector('#n-kept').textContent !== '0'")
        assert page.problems() == []
    assert server.status == 0

"""The page of a trace in a real browser: what it shows is what was traced, for every way to ask for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from amount import everything
from browser import CHROMIUM, Browser, Page
from traces import make_trace

from infer import SamplingParams, generate
from infer.trace import Trace
from infer.trace.data import Alternative, AttentionRows
from infer.trace.page import LEVELS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")

Open = Callable[..., AbstractContextManager[Page]]

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "${window.hacked = 1}",
    "&lt;b&gt;",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Open:
    @contextmanager
    def show(trace: Trace, link: str = "", **media: str) -> Iterator[Page]:
        """link: what follows # in the address."""
        path = tmp_path / "trace.html"
        trace.save(path)
        with browser.page(path.as_uri() + link, **media) as page:
            yield page
            page.js("localStorage.clear()")  # the next test has a theme of its own

    return show


def assert_clean(page: Page) -> None:
    """No error, and no request but for the page itself."""
    assert page.problems() == []
    (address,) = [url for url in page.requests() if url != "about:blank"]
    assert address.startswith("file://")


def token(step: int) -> str:
    return f'[data-step="{step}"]'


def selected(page: Page) -> list[int]:
    steps: list[int] = page.js(
        "[...document.querySelectorAll('.token[aria-pressed=true]')].map(e => Number(e.dataset.step))"
    )
    return steps


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.js(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")
    return found


def percent(text: str) -> float:
    return float(text.strip("<%")) / 100


def row(trace: Trace, step: int, layer: int | None = None, head: int | None = None) -> npt.NDArray[np.float64]:
    """Weights by position; layer and head by index, or the mean over them."""
    layers = trace.layers if layer is None else [trace.layers[layer]]
    out = np.zeros(len(trace.prompt) + step)
    for number in layers:
        first, weights = trace.steps[step].attention[number]
        chosen = weights if head is None else weights[head : head + 1]
        out[first:] += chosen.astype(np.float64).mean(0)
    return out / len(layers)


def shades(page: Page) -> list[float]:
    """By position, from 0 to 1."""
    found: list[float] = page.js(
        "[...document.querySelectorAll('.token')].map(e => parseFloat(getComputedStyle(e).getPropertyValue('--a'))/100)"
    )
    return found


def edges(page: Page, *selectors: str) -> list[dict[str, float]]:
    """Where elements are on the screen."""
    found = f"{list(selectors)}.map(e => document.querySelector(e).getBoundingClientRect().toJSON())"
    boxes: list[dict[str, float]] = page.js(found)
    return boxes


def assert_shows(page: Page, trace: Trace, step: int, layer: int | None = None, head: int | None = None) -> None:
    """The selected step's own numbers, everywhere on the page."""
    chosen = trace.steps[step]
    assert selected(page) == [step]
    assert page.text("#where").startswith(f"Step {step + 1} of {len(trace.steps)} ")
    assert percent(page.text("#probability")) == pytest.approx(chosen.probability, abs=6e-4)
    assert page.text("#entropy") == f"{chosen.entropy:.2f} nats"
    choices = float(re.sub(r"[^\d.]", "", page.text("#choices")))
    assert choices == pytest.approx(math.exp(chosen.entropy), rel=0.06)

    listed = [(a.text, a.probability) for a in chosen.alternatives]
    place = next((i for i, a in enumerate(chosen.alternatives) if a.token_id == chosen.token_id), len(listed))
    if place == len(listed):
        listed.append((chosen.text, chosen.probability))
    assert [text.replace("·", " ") for text in texts(page, "#alternatives .name")] == [text for text, _ in listed]
    shown = [percent(text) for text in texts(page, "#alternatives .value")]
    assert shown == pytest.approx([p for _, p in listed], abs=6e-4)
    marked = page.js("[...document.querySelectorAll('#alternatives li')].map(e => e.classList.contains('chosen'))")
    assert marked == [i == place for i in range(len(listed))]

    weights = row(trace, step, layer, head)
    wanted = np.zeros(len(trace.prompt) + len(trace.steps))
    wanted[: len(weights)] = np.sqrt(weights / weights.max())
    rounding = 0.011 + 1.01 / LEVELS / math.sqrt(weights.max())  # to 50 tones; of a weight and the largest, to a level
    assert np.abs(shades(page) - wanted).max() < rounding
    looked = [percent(text) for text in texts(page, "#looked .value")]
    assert looked == pytest.approx(sorted(weights, reverse=True)[:6], abs=0.005)

    filled, capacity = chosen.cache_positions, trace.cache_capacity
    assert page.text("#cache-text") == f"{filled:,} of {capacity:,} positions filled"
    added = filled - (trace.steps[step - 1].cache_positions if step else 0)
    assert f"Step {step + 1} wrote {added} position" in page.text("#cache-note")


def drawn(page: Page, canvas: str, drawing: str = "") -> str:
    """What is on the canvas, once it is in sight and up to date."""
    page.js(f"$('{canvas}').scrollIntoView()")
    page.wait(f"!{drawing or canvas}.dirty")
    picture: str = page.js(f"$('{canvas}').toDataURL()")
    return picture


def assert_drawn(page: Page) -> None:
    for canvas in ("chart", "overview", "cache", "matrix"):
        drawn(page, canvas)
        pixels = f"$('{canvas}').getContext('2d').getImageData(0, 0, $('{canvas}').width, $('{canvas}').height)"
        assert page.js(f"{pixels}.data.some(Boolean)"), canvas


def test_opens_on_the_first_token(show: Open) -> None:
    trace = make_trace(prompt=400)
    with show(trace) as page:
        assert_shows(page, trace, 0)
        box, chosen = edges(page, "#text", ".token[aria-pressed=true]")
        assert box["top"] <= chosen["top"] < chosen["bottom"] <= box["bottom"], "it is in sight"
        assert page.js("scrollY") == 0
        assert_clean(page)


def test_the_run(show: Open) -> None:
    trace = make_trace()
    with show(trace) as page:
        page.press("Escape")
        assert page.js("document.title") == "made up · trace"
        assert page.text("h1") == "made up"
        assert texts(page, ".token") == [t.text for t in trace.prompt] + [s.text for s in trace.steps]
        assert texts(page, ".token.generated") == [s.text for s in trace.steps]
        assert selected(page) == []
        mean = np.mean([step.entropy for step in trace.steps])
        assert f"{mean:.2f} nats" in page.text("#run")
        assert page.text("#cache-text") == "16 of 40 positions filled"
        # The surer a token, the paler: the tone is in percent of 5 nats.
        levels = [float(page.js(f"$('text').querySelector('{token(s)}').dataset.e")) * 2 for s in range(12)]
        assert levels == pytest.approx([min(100, 20 * step.entropy) for step in trace.steps], abs=1.01)
        order = np.argsort(levels)
        assert page.style(token(int(order[0])), "backgroundColor") != page.style(
            token(int(order[-1])), "backgroundColor"
        )
        assert_drawn(page)
        assert_clean(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accepted_drafts_are_marked(show: Open, theme: str) -> None:
    trace = make_trace(texts=[" a", "\n", " b"])
    for step in (1, 2, 7):
        trace.steps[step] = replace(trace.steps[step], drafted=True)
    with show(trace, prefers_color_scheme=theme) as page:
        lines = [page.style(token(step), "textDecorationLine") for step in range(12)]
        assert lines == ["underline" if step in (1, 2, 7) else "none" for step in range(12)]
        assert page.style(token(2), "textDecorationColor") == page.style(token(2), "color")
        assert page.style("#legend-drafted", "display") != "none"
        for step in (2, 3):
            page.click(token(step))
            assert ("drafted" in page.text("#where")) == (step == 2)
            assert_shows(page, trace, step)
        assert_clean(page)
    with show(make_trace(), prefers_color_scheme=theme) as page:
        assert page.style("#legend-drafted", "display") == "none"


def test_a_click_on_a_token_shows_its_numbers(show: Open) -> None:
    trace = make_trace(window=6)
    with show(trace) as page:
        page.click("#close")
        plain = page.style(token(3), "backgroundColor")
        for step in (4, 11, 0, 7):
            page.click(token(step))
            assert_shows(page, trace, step)
        page.click(token(7))
        assert page.style(token(3), "backgroundColor") != plain
        page.click("#close")
        assert selected(page) == []
        assert page.style(token(3), "backgroundColor") == plain
        assert_clean(page)


def test_cache_fills_with_the_steps(show: Open) -> None:
    with show(make_trace()) as page:
        pictures = set()
        for step in (0, 1, 11):
            page.click(token(step))
            pictures.add(drawn(page, "cache"))
        assert len(pictures) == 3


def test_layers_and_heads(show: Open) -> None:
    trace = make_trace(window=6, layers=(2, 5), heads=(1, 4, 7))
    with show(trace) as page:
        page.click(token(9))
        for layer, head in [(0, 0), (1, None), (None, 2), (1, 2), (None, None)]:
            page.choose("#layer", "mean" if layer is None else layer)
            page.choose("#head", "mean" if head is None else head)
            assert_shows(page, trace, 9, layer, head)
        assert texts(page, "#layer option") == ["mean of all", "layer 2", "layer 5"]
        assert texts(page, "#head option") == ["mean of all", "head 1", "head 4", "head 7"]

        # The overview: its strips, and the numbers at its edges. Another token keeps the choice.
        width = page.js("document.querySelector('#overview').clientWidth")
        before = drawn(page, "overview")
        page.click("#overview", x=width - 20, y=32 + 24 + 10)
        assert_shows(page, trace, 9, 1, 2)
        assert drawn(page, "overview") != before
        page.click("#overview", x=5, y=32 + 10)
        assert_shows(page, trace, 9, 0, None)
        page.click("#overview", x=width - 20, y=5)
        assert_shows(page, trace, 9, None, 2)
        page.click(token(4))
        assert_shows(page, trace, 4, None, 2)
        assert_clean(page)


def test_without_the_first_token(show: Open) -> None:
    """Where the first position takes nearly all, the others can still be told apart."""
    trace = make_trace()
    with show(trace) as page:
        page.click(token(9))
        page.click("#sink")
        weights = row(trace, 9)[1:]
        assert shades(page)[0] == 0
        assert shades(page)[1 : 1 + len(weights)] == pytest.approx(np.sqrt(weights / weights.max()), abs=0.02)


def test_weights_are_those_of_the_trace(show: Open) -> None:
    trace = make_trace(window=6)
    with show(trace) as page:
        for step in (0, 5, 11):
            for layer in range(2):
                for head in range(3):
                    wanted = row(trace, step, layer, head)
                    got = np.array(page.js(f"Array.from(trace.weights({step}, {layer}, {head}))"))
                    assert np.abs(np.sqrt(got) - np.sqrt(wanted)).max() <= 0.501 / LEVELS


def test_keyboard(show: Open) -> None:
    trace = make_trace()
    with show(trace) as page:
        page.press("Escape")
        page.press("ArrowRight")
        assert_shows(page, trace, 0)
        for key, step in [("ArrowRight", 1), ("End", 11), ("ArrowRight", 11), ("ArrowLeft", 10), ("Home", 0)]:
            page.press(key)
            assert selected(page) == [step]
        page.press("Escape")
        assert selected(page) == []
        # Tab finds one token, Enter takes it, and the focus goes along with the arrows.
        page.js("document.querySelector('#theme').focus()")
        page.press("Tab")
        assert page.js("document.activeElement.dataset.step") == "0"
        page.press("Enter")
        assert_shows(page, trace, 0)
        page.press("ArrowRight")
        assert page.js("document.activeElement.dataset.step") == "1"
        assert page.js("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
        # In a picker the arrows are the picker's.
        page.js("document.querySelector('#layer').focus()")
        page.press("ArrowRight")
        assert selected(page) == [1]
        assert_clean(page)


def test_chart_selects_a_step(show: Open) -> None:
    trace = make_trace()
    with show(trace) as page:
        before = drawn(page, "chart")
        left, width = 36, page.js("document.querySelector('#chart').clientWidth")
        for step in (3, 11):
            page.click("#chart", x=left + (step + 0.5) * (width - left) / 12)
            assert_shows(page, trace, step)
        assert drawn(page, "chart") != before


def test_hover_says_what_a_token_is(show: Open) -> None:
    trace = make_trace()
    with show(trace) as page:
        page.click(token(9))
        page.hover(".prompt")
        assert "given, not chosen" in page.text("#tip")
        attention = page.text("#tip").split("attention: ")[1]
        assert percent(attention) == pytest.approx(row(trace, 9)[0], abs=0.002)


def test_play_goes_through_the_run(show: Open) -> None:
    trace = make_trace(steps=4)
    with show(trace, prefers_reduced_motion="reduce") as page:
        assert page.js("document.querySelector('#speed').value") == "500"
        page.js(
            "window.seen = []; new MutationObserver(() => seen.push(document.querySelector('#where').textContent))"
            ".observe(document.querySelector('#where'), {childList: true})"
        )
        page.choose("#speed", 60)
        page.click("#play")
        page.wait("document.querySelector('#play').textContent.includes('Play')")
        assert_shows(page, trace, 3)
        assert page.js("seen.map(s => s.split(' ')[1])") == ["2", "3", "4"], "on from the one selected"
        page.choose("#speed", 500)
        page.click("#play")
        page.click(token(2))
        assert "Play" in page.text("#play"), "a click ends playing"
        assert_shows(page, trace, 2)
        assert_clean(page)


def luminance(page: Page, selector: str, name: str) -> float:
    """Of a colour, from 0 to 1, roughly."""
    values = re.findall(r"[\d.]+", page.style(selector, name))
    return sum(map(float, values[:3])) / (3 * 255)


def test_light_and_dark(show: Open) -> None:
    trace = make_trace()
    for scheme, other in [("light", "dark"), ("dark", "light")]:
        with show(trace, prefers_color_scheme=scheme) as page:
            before = drawn(page, "cache")
            paper, ink = luminance(page, "body", "backgroundColor"), luminance(page, "body", "color")
            assert (paper > ink) == (scheme == "light")
            assert abs(paper - ink) > 0.6
            assert other.title() in page.text("#theme")
            page.click("#theme")
            assert (luminance(page, "body", "backgroundColor") > 0.5) == (scheme == "dark")
            assert scheme.title() in page.text("#theme")
            assert drawn(page, "cache") != before
            assert_clean(page)


def test_follows_the_system(show: Open) -> None:
    with show(make_trace(), prefers_color_scheme="light") as page:
        before = drawn(page, "cache")
        page.media(prefers_color_scheme="dark")
        page.wait("$('theme').textContent.includes('Light')")
        assert luminance(page, "body", "backgroundColor") < 0.3
        assert drawn(page, "cache") != before


def test_narrow_screens_do_not_scroll_sideways(show: Open) -> None:
    trace = make_trace(heads=range(9), texts=["x" * 200])
    with show(trace) as page:
        page.size(400, 800)
        page.click(token(9))
        page.wait("document.documentElement.scrollWidth <= 400")
        assert_shows(page, trace, 9)


def test_hostile_text_is_shown_as_text(show: Open) -> None:
    trace = make_trace(texts=HOSTILE)
    trace.title = HOSTILE[0]
    trace.prompt = [t._replace(text=text) for t, text in zip(trace.prompt, HOSTILE, strict=True)]
    with show(trace) as page:
        assert texts(page, ".generated")[: len(HOSTILE)] == HOSTILE
        assert texts(page, ".prompt") == HOSTILE
        assert page.text("h1") == HOSTILE[0]
        for step in range(len(HOSTILE)):
            page.click(token(step))
            assert_shows(page, trace, step)
        page.click("#chart", x=100)
        assert page.js("window.hacked") is None
        assert page.js("document.querySelectorAll('img').length") == 0
        assert_clean(page)


def test_what_cannot_be_seen_is_shown(show: Open) -> None:
    odd = [
        "\n",
        ".\n\n",
        "a\nb",
        "  ",
        "\t",
        "\u202e",
        "",
        "<|im_end|>",
        "\ufffd",
    ]
    with show(make_trace(texts=odd)) as page:
        shown = [texts(page, token(step))[0] for step in range(len(odd))]
        assert shown == ["↵", ".↵↵", "a↵\nb", "··", "⇥", "U+202E", "∅", "<|im_end|>", "U+FFFD"]
        assert page.js("document.querySelectorAll('#text br').length") == 3
        top = [page.js(f"document.querySelector('{token(step)}').offsetTop") for step in (0, 1, 2)]
        assert top[0] < top[1] < top[2], "newlines break the line"
        assert len(page.js(f"Array.from(document.querySelector('{token(6)}').getClientRects())")) == 1


@pytest.mark.parametrize("nothing", ["layers", "heads"])
def test_without_attention(show: Open, nothing: str) -> None:
    with show(make_trace(**{nothing: ()})) as page:
        page.click(token(5))
        assert selected(page) == [5]
        assert "No layer was traced" in page.text("#looked-about")
        assert set(shades(page)) == {0}
        assert page.text("#attention") == ""
        assert page.text("#cache-text") == "10 of 40 positions filled"
        assert_clean(page)


def test_a_single_step(show: Open) -> None:
    trace = make_trace(steps=1, prompt=1, layers=[0], heads=[0])
    with show(trace) as page:
        page.click(token(0))
        assert_shows(page, trace, 0)
        page.press("ArrowRight")
        page.click("#play")
        assert selected(page) == [0]
        assert_clean(page)


def test_without_a_cache(show: Open) -> None:
    trace = make_trace(capacity=0)
    trace.steps = [replace(step, cache_positions=0, cache_bytes=0) for step in trace.steps]
    with show(trace) as page:
        page.click(token(2))
        assert page.text("#cache-text").startswith("No cache")
        assert page.text("#cache-keys") == ""
        assert_clean(page)


def test_a_context_that_was_used_up_and_numbers_that_are_none(show: Open) -> None:
    trace = make_trace()
    trace.steps[3] = replace(trace.steps[3], probability=math.nan, entropy=math.nan, cache_positions=0, cache_bytes=0)
    with show(trace) as page:
        page.click(token(3))
        assert page.text("#cache-text") == "0 of 40 positions filled"
        assert page.text("#cache-note").startswith("The context is full")
        assert (page.text("#probability"), page.text("#entropy")) == ("NaN", "NaN")
        assert_clean(page)


def test_a_thousand_steps(show: Open) -> None:
    trace = make_trace(steps=1000, prompt=30, layers=(0, 1), heads=(0, 1), capacity=1030)
    with show(trace) as page:
        assert page.js("document.querySelectorAll('.generated').length") == 1000
        for step in (999, 500):
            page.click(token(step))
            assert_shows(page, trace, step)
        page.press("ArrowRight")
        assert_shows(page, trace, 501)
        edges = "['#text', '.token[aria-pressed=true]'].map(e => document.querySelector(e).getBoundingClientRect())"
        box, chosen = page.js(f"{edges}.map(r => [r.top, r.bottom])")
        assert box[0] <= chosen[0] < chosen[1] <= box[1], "the selected token is in sight"
        assert "4 positions" in page.text("#cache-keys")
        assert_drawn(page)
        assert_clean(page)


def prompt_row(trace: Trace, position: int, layer: int, head: int) -> npt.NDArray[np.float64]:
    prediction = trace.prompt[position].prediction
    assert prediction is not None
    first, weights = prediction.attention[trace.layers[layer]]
    out = np.zeros(position)
    out[first:] = weights[head]
    return out


def at(position: int) -> str:
    return f'[data-position="{position}"]'


def test_a_token_of_the_prompt(show: Open) -> None:
    trace = make_trace(prompt=9, prompt_rows=6, window=4)
    with show(trace) as page:
        for position in (8, 3):
            page.click(at(position))
            assert page.js("document.querySelector('[aria-pressed=true].token').dataset.position") == str(position)
            prediction = trace.prompt[position].prediction
            assert prediction is not None
            assert page.text("#where") == f"Prompt token {position + 1} of 9 · position {position}"
            assert percent(page.text("#probability")) == pytest.approx(prediction.probability, abs=6e-4)
            assert page.text("#surprisal") == f"surprisal {prediction.surprisal:.2f} nats, rank {prediction.rank}"
            assert page.text("#entropy") == f"{prediction.entropy:.2f} nats"
            assert page.text("#alternatives-title") == "The model's prediction"
            names = texts(page, "#alternatives .name")
            assert [name.replace("·", " ") for name in names] == [
                *(a.text for a in prediction.alternatives),
                f" p{position}",
            ]
            for layer, head in [(0, 0), (1, 2)]:
                page.choose("#layer", layer)
                page.choose("#head", head)
                weights = prompt_row(trace, position, layer, head)
                got = np.array(page.js(f"Array.from(trace.rowAt({position}, {layer}, {head}))"))
                assert np.abs(np.sqrt(got) - np.sqrt(weights)).max() <= 0.501 / LEVELS
                looked = [percent(text) for text in texts(page, "#looked .value")]
                assert looked == pytest.approx(sorted(weights, reverse=True)[:6], abs=0.005)
                rounding = 0.011 + 1.01 / LEVELS / math.sqrt(weights.max())
                wanted = np.sqrt(weights / weights.max())
                assert np.abs(np.array(shades(page)[:position]) - wanted).max() < rounding
        assert page.js("document.querySelectorAll('.query').length") == 1
        assert "last 6 tokens" in page.text("#prompt-note")
        assert_clean(page)


def test_what_was_not_kept_of_the_prompt(show: Open) -> None:
    trace = make_trace(prompt=9, prompt_rows=6)
    with show(trace) as page:
        for position, words in [(0, "Nothing predicts the first token"), (2, "This token was not recorded")]:
            page.click(at(position))
            assert page.text("#unpredicted").startswith(words)
            assert page.text("#looked-about").startswith(words)
            assert page.text("#probability") == ""
            assert set(shades(page)) == {0}
        assert_clean(page)
    trace.num_cached_tokens = 2
    with show(trace) as page:
        assert "The prompt's first 2 tokens came from the cache" in page.text("#prompt-note")
        page.click(at(2))
        assert page.text("#unpredicted").startswith("The prediction of this token was cached")
    with show(make_trace(prompt=9, prompt_rows=8)) as page:
        assert page.text("#prompt-note") == "", "all that can be predicted is"
    with show(make_trace(prompt=9)) as page:
        assert page.text("#prompt-note").startswith("Surprisal and attention of the prompt were not recorded")


def colours(page: Page, canvas: str, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """Of the cells of a matrix, [rows, columns] of red, green, blue and alpha."""
    found = page.js(
        f"(() => {{ const {{ left, top, wide, high }} = matrixLayout({canvas}.width), out = [];"
        f" const {{ data, width }} = $('{canvas}').getContext('2d').getImageData(0, 0, {canvas}.canvas.width,"
        f" {canvas}.canvas.height); for (let r = 0; r < {rows}; r++) for (let c = 0; c < {columns}; c++) {{"
        " const i = 4 * (Math.floor(top + (r + 0.5) * high) * width + Math.floor(left + (c + 0.5) * wide));"
        " out.push(...data.slice(i, i + 4)); } return out; })()"
    )
    return np.array(found, dtype=np.float64).reshape(rows, columns, 4)


@pytest.mark.parametrize("rows", [8, 4])
def test_matrix(show: Open, rows: int) -> None:
    """A cell for each query and key: as strong as its weight. rows: of the prompt that are there."""
    trace = make_trace(prompt=9, prompt_rows=rows, window=6)
    first = 8 - rows  # the query of the first row
    with show(trace) as page:
        before = drawn(page, "matrix")
        page.choose("#layer", 1)
        page.choose("#head", 2)
        assert drawn(page, "matrix") != before
        page.press("Escape")  # the frame of the selected row is in no one's way
        drawn(page, "matrix")
        queries = [prompt_row(trace, 9 - rows + i, 1, 2) for i in range(rows)] + [
            row(trace, s, 1, 2) for s in range(12)
        ]
        most = max(weights.max() for weights in queries)
        found = colours(page, "matrix", len(queries), 20)
        assert found[0, 19, 3] == 0, "no query sees what comes after it"
        empty, full = (np.array(page.js(f"Array.from(rgb('--{name}'))")) for name in ("cell", "attention-strong"))
        for number, weights in enumerate(queries):
            shares = np.sqrt(weights / most)[:, None]
            wanted = shares * full + (1 - shares) * empty
            assert np.abs(found[number, : len(weights)] - wanted)[:, :3].max() <= 6, number
        # A click on a row selects what it predicted.
        place = page.js("matrixLayout(matrix.width)")
        x, y = place["left"] + 1.5 * place["wide"], place["top"] + (rows + 3.5) * place["high"]
        page.click("#matrix", x=x, y=y)
        assert selected(page) == [3]
        page.hover("#matrix", x=x, y=y)
        assert f'looking: " w2" ({9 + 2})' in page.text("#tip")
        assert 'at: " p1" (1)' in page.text("#tip")
        page.click("#matrix", x=place["left"] + 0.5 * place["wide"], y=place["top"] + 0.5 * place["high"])
        assert page.text("#where").startswith(f"Prompt token {first + 2} of 9")
        assert_clean(page)


def test_two_heads_side_by_side(show: Open) -> None:
    trace = make_trace(layers=(2, 5), heads=(1, 4, 7), prompt_rows=4)
    with show(trace) as page:
        page.choose("#layer", 0)
        page.choose("#head", 1)
        assert page.text("#matrix2-part") == page.text("#looked2-part") == ""
        page.click("#compare")
        assert (page.text("#which"), page.text("#which2")) == ("layer 2, head 4", "layer 2, head 7")
        page.choose("#layer2", 1)
        page.choose("#head2", 0)
        assert page.text("#matrix-which") == "layer 2, head 4"
        assert page.text("#matrix2-which") == "layer 5, head 1"
        for list_, layer, head in [("#looked", 0, 1), ("#looked2", 1, 0)]:
            shown = [percent(text) for text in texts(page, f"{list_} .value")]
            assert shown == pytest.approx(sorted(row(trace, 0, layer, head), reverse=True)[:6], abs=0.005)
        assert drawn(page, "matrix") != drawn(page, "matrix2")
        left, right = edges(page, "#matrix", "#matrix2")
        assert left["top"] == right["top"]
        assert left["right"] <= right["left"]
        width = page.js("document.querySelector('#overview').clientWidth")
        at = page.hover("#overview", x=width - 20, y=32 + 24 + 10)
        for kind in ("mousePressed", "mouseReleased"):  # with Shift
            page.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, modifiers=8, **at)
        assert (page.text("#which"), page.text("#which2")) == ("layer 2, head 4", "layer 5, head 7")
        page.click("#compare")
        assert page.text("#matrix2-part") == ""
        assert_clean(page)


def test_arrows_change_layers_and_steps(show: Open) -> None:
    trace = make_trace(layers=(2, 5), heads=(1, 4))
    with show(trace) as page:
        page.press("ArrowDown")
        assert_shows(page, trace, 0, 0)
        for _ in range(3):
            page.press("ArrowDown")
        assert_shows(page, trace, 0, 1)
        page.press("ArrowDown", shift=True)
        assert_shows(page, trace, 0, 1, 0)
        assert page.js("[layer.value, head.value]") == ["1", "0"]
        page.press("ArrowRight")
        assert_shows(page, trace, 1, 1, 0)
        for _ in range(3):
            page.press("ArrowUp")
        assert page.js("layer.value") == "mean"
        for _ in range(3):
            page.press("ArrowLeft")
        assert page.text("#where").startswith("Prompt token 4 of 5")
        assert page.js("scrollY") == 0, "the arrows are not the page's"


def test_link(show: Open) -> None:
    trace = make_trace(layers=(2, 5), heads=(1, 4, 7), prompt_rows=4)
    with show(trace, "#step=4&layer=5&head=7&compare&layer2=2&head2=1") as page:
        assert_shows(page, trace, 3, 1, 2)
        assert page.text("#which2") == "layer 2, head 1"
        page.click("#compare")
        page.click(token(8))
        page.choose("#head", 0)
        page.wait("location.hash == '#step=9&layer=5&head=1'")
        page.click(at(3))
        page.wait("location.hash == '#prompt=4&layer=5&head=1'")
        page.js("location.hash = '#step=2&head=4'")
        page.wait("document.querySelector('#where').textContent.startsWith('Step 2 ')")
        assert_shows(page, trace, 1, None, 1)
        page.press("Escape")
        page.wait("location.hash == '#step=none&head=4'")
        assert_clean(page)
    with show(trace, "#step=none") as page:
        assert selected(page) == []
    with show(trace, "#prompt=3") as page:
        assert page.text("#where").startswith("Prompt token 3 of 5")


@pytest.mark.parametrize("link", ["#step=13", "#step=0", "#step=x&layer=9", "#prompt=6", "#head=-1", "#<script>", "#%"])
def test_a_link_to_nothing(show: Open, link: str) -> None:
    trace = make_trace()
    with show(trace, link) as page:
        assert_shows(page, trace, 0)
        assert_clean(page)


def test_theme_is_remembered(show: Open, browser: Browser, tmp_path: Path) -> None:
    make_trace().save(tmp_path / "other.html")
    with show(make_trace(), prefers_color_scheme="light") as page:
        page.click("#theme")
        for _ in range(20):  # pages are processes: the storage that the test before cleared may be cleared late
            with browser.page(tmp_path / "other.html", prefers_color_scheme="light") as other:
                if other.js("localStorage.length") == 1:
                    break
            page.click("#theme")
            page.click("#theme")
        with browser.page(tmp_path / "other.html", prefers_color_scheme="light") as other:
            assert luminance(other, "body", "backgroundColor") < 0.3
            other.click("#theme")
            assert other.js("localStorage.length") == 0, "what the system has is not kept"
    with show(make_trace(), prefers_color_scheme="light") as page:
        assert luminance(page, "body", "backgroundColor") > 0.7


def test_wide_screens_are_used(show: Open) -> None:
    with show(make_trace(prompt_rows=4)) as page:
        page.size(1920, 1080)
        page.frame()
        cards = ["text", "attention", "matrix", "chart", "cache"]
        text, attention, matrix, chart, cache = edges(page, *(f'[data-card="{card}"]' for card in cards))
        assert text["left"] <= 40
        assert cache["right"] >= 1880
        assert text["right"] < attention["left"] < attention["right"] < cache["left"], "three columns"
        assert matrix["left"] == attention["left"]
        assert chart["left"] == text["left"]
        assert chart["top"] == pytest.approx(text["bottom"] + 14, abs=1), "without a hole"
        page.size(1280, 900)
        page.frame()
        text, attention, cache = edges(page, *(f'[data-card="{card}"]' for card in ("text", "attention", "cache")))
        assert attention["left"] == text["left"]
        assert attention["top"] >= text["bottom"]
        assert cache["left"] > text["right"]


def test_parts_of_characters_are_joined(show: Open) -> None:
    """你 in two tokens, an emoji in three, one of several code points, and bytes that never become a character."""
    parts = [b"\xe4\xbd", b"\xa0", b" \xf0\x9f", b"\x98", b"\x80", b"\xff"]
    names = ["".join(f"<0x{byte:02X}>" for byte in part) for part in parts]
    trace = make_trace(texts=["好", *names[2:], "👩", "\u200d", "🚀", "!"])
    for i in range(2):
        trace.prompt[3 + i] = trace.prompt[3 + i]._replace(text=names[i], raw=parts[i])
    for i in range(4):
        trace.steps[1 + i] = replace(trace.steps[1 + i], raw=parts[2 + i])
    trace.steps[0] = replace(trace.steps[0], alternatives=(Alternative(7, "<0xE4><0xBD>", 0.5),))
    with show(trace) as page:
        assert texts(page, ".whole") == ["你", " 😀", "👩\u200d🚀"]
        assert [texts(page, f"{at(i)}")[0] for i in (3, 4, 6, 7, 8)] == ["E4 BD", "A0", "20 F0 9F", "98", "80"]
        assert texts(page, token(4)) == ["FF"]
        assert "\ufffd" not in page.js("document.body.innerText")
        assert texts(page, "#alternatives .name")[0] == "E4 BD"
        page.click(at(4))
        assert page.text("#token") == "A0 of 你"
        page.click(token(2))
        assert selected(page) == [2]
        assert page.text("#token") == "98 of  😀"
        assert page.js(f"document.querySelector('{token(2)}').ariaLabel") == "part 2 of 3 of  😀"
        # The character stands over its parts, and next to the text around it.
        whole, part, before = edges(page, ".joined:nth-of-type(4) .whole", at(3), at(2))
        assert whole["bottom"] <= part["top"] + 1
        assert abs(part["bottom"] - before["bottom"]) < 20
        assert_clean(page)


def test_settings(show: Open) -> None:
    trace = make_trace()
    with show(trace) as page:
        assert page.text("#settings-card") == ""
    trace.settings = {
        "model": HOSTILE[0],
        "dtype": "bfloat16",
        "quantize": "int8",
        "weights": "int8",
        "params": {"seed": 2**64 - 1, "temperature": 0.5, "stop": ["</dl>"]},
        "kv_cache": True,
    }
    with show(trace) as page:
        shown = dict(zip(texts(page, "#settings dt"), texts(page, "#settings dd"), strict=True))
        assert shown == {
            "model": HOSTILE[0],
            "dtype": "bfloat16",
            "weights": "int8",
            "temperature": "0.5",
            "seed": "18446744073709551615",
            "stop": "'</dl>'",
            "KV cache": "yes",
        }
        assert " · int8 · temperature 0.5 · seed 18446744073709551615" in page.text("#about")
        assert page.text("#repeat") == "infer trace --from trace.html"
        assert_clean(page)


def test_in_a_notebook(browser: Browser, tmp_path: Path) -> None:
    """The frame may run its script and nothing else: no storage, no address."""
    trace = make_trace(texts=['"><script>parent.hacked = 1</script>', "&quot;"], prompt_rows=4)
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        "<!doctype html><html><body>" + str(trace._repr_html_()) + "<script>document.querySelector('iframe').onload ="
        " () => document.documentElement.dataset.ready = ''</script></body></html>",
        encoding="utf-8",
    )
    with browser.page(notebook) as page:
        (frame,) = [each for each in browser.send("Target.getTargets")["targetInfos"] if each["type"] == "iframe"]
        session = browser.send("Target.attachToTarget", targetId=frame["targetId"], flatten=True)["sessionId"]
        inside = Page(browser, session)
        inside.wait("'ready' in document.documentElement.dataset")
        assert inside.text("[aria-pressed=true]") == trace.steps[0].text
        inside.js("document.querySelector('#theme').click()")
        inside.js("document.querySelector('.prompt').click()")
        assert inside.text("#where").startswith("Prompt token 1 ")
        assert inside.problems() == page.problems() == []
        assert page.js("window.hacked") is None
        assert page.js("document.querySelectorAll('body > *').length") == 2, "nothing got out of the frame"


@everything
def test_a_long_run_is_quick(show: Open) -> None:
    """30 layers and 9 heads of 500 steps: a selection takes less than a quarter of a second."""
    trace = make_trace(steps=500, prompt=20, layers=(), heads=(), capacity=520)
    trace.layers, trace.heads = list(range(30)), list(range(9))
    for i, step in enumerate(trace.steps):
        rows = AttentionRows(0, np.full((9, 20 + i), 1 / (20 + i), dtype=np.float16))
        trace.steps[i] = replace(step, attention=dict.fromkeys(trace.layers, rows))
    with show(trace) as page:
        select = "(() => { const start = performance.now(); trace.select(%d); return performance.now() - start; })()"
        times = [page.js(select % step) for step in (499, 250, 400)]
        assert min(times) < 250
        page.choose("#layer", 12)
        assert_drawn(page)
        assert_clean(page)


class Numbers:
    """A tokenizer whose tokens are numbers."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f" {token}" for token in token_ids)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_run_of_a_model(show: Open, tiny_model: Callable[..., Any], family: str) -> None:
    """gemma3: with a window shorter than the run."""
    trace = Trace()
    generate(tiny_model(model_type=family), Numbers(), [1, 2, 3], SamplingParams(max_new_tokens=8), trace=trace)
    with show(trace) as page:
        assert texts(page, ".token") == [t.text for t in trace.prompt] + [s.text for s in trace.steps]
        for step in (0, 7):
            page.click(token(step))
            assert_shows(page, trace, step)
        page.choose("#layer", 0)
        page.choose("#head", 3)
        assert_shows(page, trace, 7, 0, 3)
        assert_clean(page)


def test_what_is_grey_is_said(show: Open) -> None:
    def greys() -> set[str]:
        muted = page.style("#looked-about", "color")
        return {
            name
            for name, selector in (("prompt", ".prompt"), ("later", token(11)), ("earlier", token(2)))
            if page.style(selector, "color") == muted
        }

    with show(make_trace()) as page:
        page.click(token(5))
        assert page.text("#grey") == "tokens generated later are grey"
        assert greys() == {"later"}
        page.click(".prompt")
        assert page.text("#grey") == "tokens generated later are grey"
        assert greys() == {"later", "earlier"}
        page.click("#close")
        assert page.text("#grey") == "the prompt is grey"
        assert greys() == {"prompt"}


def test_repeated_tokens_have_their_positions_beside_them(show: Open) -> None:
    trace = make_trace()
    again, first = trace.steps[1], len(trace.prompt)
    trace.steps[6] = replace(trace.steps[6], token_id=again.token_id, text=again.text)
    weights = trace.steps[9].attention[0].weights[0]
    weights[:] = 0
    weights[[0, first + 1, first + 6]] = 0.2, 0.3, 0.5
    with show(trace) as page:
        page.click(token(9))
        page.choose("#layer", 0)
        page.choose("#head", 0)
        shown = "[...document.querySelectorAll('#looked .name')].slice(0, 3).map(e => e.textContent)"
        assert page.js(shown) == [f"·w1{first + 6}", f"·w1{first + 1}", "·p0"]
        assert page.js(f"[short({first + 1}), short({first + 6})]") == [
            f"{again.text.replace(' ', '·')} {first + 1}",
            f"{again.text.replace(' ', '·')} {first + 6}",
        ]


def test_the_strip_of_a_head(show: Open) -> None:
    """A column for each token: a click selects it. A second strip appears for a comparison."""
    trace = make_trace(prompt=20, steps=100)
    with show(trace) as page:
        page.click(token(50))
        before = drawn(page, "strip", "strips")
        high = page.js("$('strip').clientHeight")
        page.choose("#head", 1)
        assert drawn(page, "strip", "strips") != before
        page.click("#compare")
        drawn(page, "strip", "strips")
        assert page.js("$('strip').clientHeight") > high
        page.click("#strip", x=page.js("strips.width") * (20 + 30.5) / 120, y=25)
        assert selected(page) == [30]
        assert_clean(page)


def test_on_paper(show: Open) -> None:
    """Light, in one column, complete, without controls; and the screen as before."""
    trace = make_trace(prompt=20, steps=100)
    with show(trace, prefers_color_scheme="dark") as page:
        page.send("Emulation.setEmulatedMedia", media="print")
        drawn_all = "drawings.filter(d => d !== matrix2).every(d => !d.dirty)"
        assert page.js(f"(dispatchEvent(new Event('beforeprint')), {drawn_all})")
        assert luminance(page, "body", "color") < 0.3
        assert page.js("$('text').scrollHeight <= $('text').clientHeight")
        assert page.text("#play") == page.text("#layer") == ""
        left, right = edges(page, '[data-card="text"]', '[data-card="cache"]')
        assert left["left"] == right["left"]
        page.send("Emulation.setEmulatedMedia", media="")
        page.js("dispatchEvent(new Event('afterprint'))")
        page.media(prefers_color_scheme="dark")
        assert page.js("document.documentElement.dataset.theme") is None
        assert_clean(page)

"""Results in a notebook: text is shown as text, whatever it holds, and tokens are shaded by how likely they are."""

from __future__ import annotations

import math
import re

from infer.engine.logprobs import TokenLogprobs
from infer.engine.result import GenerationResult, Score, Timing

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(1)">&'
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;"


def result(text: str, *decode_times_s: float) -> GenerationResult:
    ids = [1] * (1 + len(decode_times_s))
    return GenerationResult([1], ids, text, "length", Timing(1.0, list(decode_times_s)), 0)


def score(*tokens: tuple[str, float | None]) -> str:
    logprobs = [None if logprob is None else TokenLogprobs(i, logprob) for i, (_, logprob) in enumerate(tokens)]
    return Score(list(range(len(tokens))), [text for text, _ in tokens], logprobs)._repr_html_()


def shades(html: str) -> list[float]:
    return [float(shade) for shade in re.findall(r"rgba\(220, 60, 40, ([\d.]+)\)", html)]


def test_a_generation() -> None:
    html = result("Hello\nthere", 0.5, 0.5)._repr_html_()
    assert ">Hello\nthere</div>" in html
    assert "white-space: pre-wrap" in html
    assert ">3 tokens · 2.0 tok/s · ended by length</div>" in html


def test_a_single_token_has_no_speed() -> None:
    assert ">1 tokens · ended by length</div>" in result("Hi")._repr_html_()


def test_hostile_text() -> None:
    for html in (result(HOSTILE)._repr_html_(), score((HOSTILE, None), (HOSTILE, -1.0))):
        assert ESCAPED in html
        assert not re.search("<(script|img)", html)


def test_a_score() -> None:
    html = score(("The", None), (" sky", math.log(0.25)), ("\n", -30.0), (" is", 0.0), ("!", -math.inf))
    assert 'title="log-probability -1.3863, probability 25.00%"' in html
    assert '<span title="nothing comes before it">The</span>' in html
    assert ">↵\n</span>" in html
    assert shades(html) == [0.08, 0.6, 0.0, 0.6]
    assert ">4 tokens · log-probability -inf · perplexity inf</div>" in html


def test_a_score_of_nothing() -> None:
    assert "0 tokens · log-probability 0.0000 · perplexity nan" in score(("The", None))

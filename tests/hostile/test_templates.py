"""Chat templates that never end, grow without bound or nest too deep: one line, soon, in little memory."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from amount import amount
from harness import Server, assert_bounded, assert_refused

SECONDS = 2.0 * 3  # what a template may cost is half a second of the processor; tests share theirs with others
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "printing loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "one expression": "{{ " + "1+" * 50_000 + "1 }}",
    "attributes": "{{ x" + ".a" * 100_000 + " }}",
    "power": "{{ 3 ** (10 ** 8) % 7 }}",
    "power of powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "shift": "{{ (2 ** 60000) ** 60000 }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "exponential macros": "".join(
        f"{{% macro m{i}() %}}{{{{ m{i + 1}() }}}}{{{{ m{i + 1}() }}}}{{% endmacro %}}" for i in range(40)
    )
    + "{% macro m40() %}{% endmacro %}{{ m0() }}",
    "sorting": "{% for i in range(9999) %}{% set x = range(99999) | list | sort(reverse=true) %}{% endfor %}",
    "wrapping": "{{ ('a ' * 9000000) | wordwrap(1) | length }}",
    "digits": "{% for i in range(99999) %}{{ (10 ** 4000) | string | int | length }}{% endfor %}",
}
LARGE = {
    "times": "{{ 'a' * 2000000000 }}",
    "times, folded": "{{ 'a' * 20000000 }}",
    "list times": "{{ ([1] * 2000000000) | length }}",
    "format": "{{ '{:>2000000000}'.format(1) }}",
    "format, nested": "{{ '{:>{w}}'.format(1, w=2000000000) }}",
    "format filter": '{{ "%2000000000d" | format(1) }}',
    "percent": '{{ "%02000000000d" % 1 }}',
    "center": "{{ 'a' | center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'a' | indent(2000000000, true) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "lists": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "range": "{{ range(2000000000) | list }}",
    "ranges": "{% for i in range(99999) %}{% set x = range(99999) | list %}{{ x }}{% endfor %}",
    "batch": "{{ [1] | batch(2000000000, 'a') | list }}",
    "slice": "{{ [1] | slice(2000000000) | list }}",
    "json": "{{ messages | tojson(indent=2000000000) }}",
    "text": "a" * 1_000_000,
    "error": "{{ raise_exception('a\n\x1b[2J' * 9000000) }}",
    "dictionary": "{{ dict(a=['a' * 9999] * 99999) | pprint }}",
}
DEEP = {
    "macros": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "some lists": "{{ " + "[" * 150 + "]" * 150 + " | map('sum') }}",
    "minus": "{{ " + "-" * 50_000 + "1 }}",
    "not": "{{ " + "not " * 50_000 + "1 }}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "fors": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "filters": "{{ x" + " | upper" * 20_000 + " }}",
    "calls": "{{ x" + "()" * 20_000 + " }}",
    "concatenation": "{{ " + "1 ~ " * 50_000 + "1 ~ x.y.z }}",
    "self": "{% block a %}{{ self.a() }}{% endblock %}",
}
OUTSIDE = {
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "from": "{% from 'os' import system %}",
    "extends": "{% extends 'x' %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.next.__globals__.os }}",
    "environment": "{{ self._TemplateReference__context.environment.from_string('x') }}",
    "format attribute": "{{ '{0.__class__}'.format(1).x.y }}",
    "append": "{{ messages.append(1) }}",
    "half a character": "{{ '\\ud800' }}",
    "nothing": "{% for",
}
ALL = {
    f"{kind}: {name}": text
    for kind, cases in {"endless": ENDLESS, "large": LARGE, "deep": DEEP, "outside": OUTSIDE}.items()
    for name, text in cases.items()
}
ENOUGH = [
    "endless: loops",
    "endless: one expression",
    "large: times",
    "large: format",
    "deep: macros",
    "outside: include",
]


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(folder, tmp_path_factory.mktemp("hostile") / "model")


def refused(server: Server, model: Path) -> None:
    outcome = server.run("generate", "--chat", "-m", model, "Hi", "--max-new-tokens", "1")
    assert_refused(outcome, seconds=SECONDS)
    assert len(outcome.err) < 600
    assert b"chat template" in outcome.err or b"half a surrogate pair" in outcome.err


@pytest.mark.parametrize("name", amount(list(ALL), ENOUGH))
def test_template(server: Server, model: Path, name: str) -> None:
    (model / "chat_template.jinja").write_text(ALL[name])
    refused(server, model)


def test_wherever_it_is_kept(server: Server, model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    settings = model / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps(known | {"chat_template": LARGE["times"]}))
    refused(server, model)


PIECES = [
    "messages",
    "'a'",
    "1",
    "7.5",
    "[1, 'b']",
    "{'a': 1}",
    "none",
    "range(99999)",
    "messages[0].content",
    "10 ** 9",
]
AROUND = [
    "({} * 99999)", "({} ~ {})", "({} + {})", "({} ** {})", "({} % {})", "({} in {})", "({} | list)", "({} | string)",
    "({} | join({}))", "({} | center(10 ** 9))", "({} | tojson)", "({} | pprint)", "({} | batch(9999))", "({} | int)",
    "({} | map('string') | list)", "({} | replace('a', {}))", "('%999999s' % {})", "('{{:>999999}}'.format({}))",
    "({} | sort)", "({} | length)", "({} | unique | list)", "({} | sum(start={}))", "({} | wordwrap(1))", "(-{})",
    "({} | indent({}))", "({} | truncate({}))", "({} | round({}))", "({} | slice({}) | list)", "({} | urlize)",
    "({}.format({}))", "({}.split({}))", "({}[{}])", "({}[::-1])", "({} | reverse | list)", "({} | xmlattr)",
]  # fmt: skip
STATEMENTS = [
    "{{{{ {} }}}}",
    "{{% for i in {} %}}{{{{ i }}}}{{% endfor %}}",
    "{{% for i in range(999) %}}{{% for j in {} %}}{{{{ {} }}}}{{% endfor %}}{{% endfor %}}",
    "{{% set n = namespace(s={}) %}}{{% for i in range(99) %}}{{% set n.s = n.s + n.s %}}{{% endfor %}}{{{{ n.s }}}}",
    "{{% macro m(x) %}}{{{{ {} }}}}{{{{ m(x) if x }}}}{{% endmacro %}}{{{{ m({}) }}}}",
    "{{% if {} %}}{{{{ {} }}}}{{% else %}}{{% break %}}{{% endif %}}",
]


def grown(rng: random.Random) -> str:
    """A template that computes something large, or something senseless."""

    def filled(form: str, depth: int) -> str:
        return form.format(*(expression(depth) for _ in range(form.count("{}"))))

    def expression(depth: int) -> str:
        return filled(rng.choice(AROUND), depth - 1) if depth and rng.random() < 0.9 else rng.choice(PIECES)

    return "".join(filled(rng.choice(STATEMENTS), rng.randint(1, 5)) for _ in range(rng.randint(1, 3)))


@pytest.mark.parametrize("seed", range(amount(500, 6)))
def test_grown(server: Server, model: Path, seed: int) -> None:
    (model / "chat_template.jinja").write_text(grown(random.Random(seed)))
    outcome = server.run("generate", "--chat", "-m", model, "Hi", "--max-new-tokens", "1")
    assert_bounded(outcome, seconds=SECONDS)
    assert (outcome.status == 0) == (not outcome.err.startswith(b"error: "))
    assert outcome.status == 0 or len(outcome.err.splitlines()) == 1

"""Chat templates render as transformers renders them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_tokenizer, byte_tokenizer_metadata, reference_model, save_folder, save_gguf
from transformers import PreTrainedTokenizerFast

import infer
from infer import render_chat_template
from infer.loader import chat as chat_module
from infer.loader import limited_process
from infer.loader.chat import TEMPLATES
from infer.loader.template_process import MEMORY

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As such templates are written: on many lines, relying on trimmed blocks, with a check of the order of turns.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}
{{ ' ' + content.strip() + ' ' + eos_token -}}
        {% endgeneration %}
    {% endif %}
{% endfor %}
"""
TOOLS = """{{- bos_token }}{% set ns = namespace(count=0) %}
{%- if tools is defined and tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if ns.count > 3 %}{% break %}{% endif %}
{{ ns.count }}. {{ message.role | capitalize }}: {{ message.content | trim | tojson }}
{%- endfor %}"""
DATED = "{{ strftime_now('%d %b %Y') }}|{{ messages | map(attribute='content') | join(', ') }}"
VARIABLES = "{% if enable_thinking is defined and enable_thinking is false %}quiet{% else %}think{% endif %}{{ mood }}"
ESCAPES = "{{ messages[0].content | upper | replace('<', '(') }}{{ '<&>' }}{{ messages[0]['content'][:3] }}"

CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hi <there> & \"you\" 'too' ünïcödé 🦙\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": " Two "},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": ""},
    ],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": ["é", 1, None, True, "<b>"]}}}


class Tokenizer:
    """What rendering asks of a tokenizer."""

    def __init__(self, template: str | None, bos_token: str | None = "<s>", eos_token: str | None = "</s>") -> None:
        self.chat_template = template
        self.bos_token = bos_token
        self.eos_token = eos_token


def render(template: str | None, chat: Any, **variables: Any) -> str:
    return render_chat_template(chat, tokenizer=Tokenizer(template), **variables)  # type: ignore[arg-type]


def by_transformers(template: str, chat: Any, **variables: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>")
    return tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **variables)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize(
    "template", [CHATML, LLAMA2, TOOLS, DATED, ESCAPES], ids=["chatml", "llama2", "tools", "dated", "escapes"]
)
def test_same_as_transformers(template: str, chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    ours = render(template, chat, add_generation_prompt=add_generation_prompt)
    assert ours == by_transformers(template, chat, add_generation_prompt=add_generation_prompt)
    assert ours


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "mood": "good"}])
def test_variables_reach_the_template(variables: dict[str, Any]) -> None:
    expected = by_transformers(VARIABLES, CHATS["user"], **variables)
    assert render(VARIABLES, CHATS["user"], **variables) == expected


def test_tools_as_json() -> None:
    expected = by_transformers(TOOLS, CHATS["user"], tools=[TOOL])
    assert '"name": "f"' in expected
    assert render(TOOLS, CHATS["user"], tools=[TOOL]) == expected


def test_generation_prompt_is_the_default() -> None:
    assert render(CHATML, CHATS["user"]).endswith("<|im_start|>assistant\n")


def test_a_template_without_special_tokens() -> None:
    tokenizer: Any = Tokenizer("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", None, None)
    assert render_chat_template([{"role": "user", "content": "x"}], tokenizer=tokenizer) == "x"


EXPECTED = {
    "llama": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "qwen3": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "chatml": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": "<bos><start_of_turn>user\n Be brief. \n\nHi<end_of_turn>\n<start_of_turn>model\n",
    "qwen2": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "mistral": "<s>[INST] Be brief. \n\nHi[/INST]",
    "ministral3": "<s>[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST]Hi[/INST]",
    "phi3": "<|system|>\n Be brief. <|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n",
    "gpt_oss": (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. "
        "Channel must be included for every message.<|end|><|start|>developer<|message|># Instructions\n\n"
        " Be brief. \n\n<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    ),
}


EXPECTED |= {"llama3": EXPECTED["llama"], "gemma": EXPECTED["gemma3"]}


@pytest.mark.parametrize("model_type", TEMPLATES)
def test_families(model_type: str) -> None:
    if model_type == "gemma2":
        with pytest.raises(ValueError, match="System role not supported"):
            render_chat_template(CHATS["system"], model_type=model_type)
    else:
        assert render_chat_template(CHATS["system"], model_type=model_type) == EXPECTED[model_type]
    turns = render_chat_template(CHATS["turns"], model_type=model_type, add_generation_prompt=False)
    assert turns == by_transformers(TEMPLATES[model_type], CHATS["turns"], add_generation_prompt=False)
    assert [turns.index(word) for word in ("One", "Two", "Three", "Four")] == sorted(
        turns.index(word) for word in ("One", "Two", "Three", "Four")
    )


def test_the_model_type_of_a_config() -> None:
    """Of Gemma 3's text models, whose config names them so."""
    gemma = [render_chat_template(CHATS["turns"], model_type=name) for name in ("gemma3", "gemma3_text")]
    assert gemma[0] == gemma[1]
    for model_type in ("text", "_text", "gpt2_text"):
        with pytest.raises(ValueError, match=f"no chat template for model_type '{model_type}'"):
            render_chat_template(CHATS["user"], model_type=model_type)


def test_qwen3_without_thinking() -> None:
    prompt = render_chat_template(CHATS["user"], model_type="qwen3", enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("enable_thinking", [True, None])
def test_qwen3_with_thinking(enable_thinking: bool | None) -> None:
    prompt = render_chat_template(CHATS["user"], model_type="qwen3", enable_thinking=enable_thinking)
    assert prompt.endswith("<|im_start|>assistant\n")


def test_qwen3_forgets_earlier_thoughts() -> None:
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    asked_again = [*CHATS["user"], answer, *CHATS["user"]]
    assert "<|im_start|>assistant\nYes.<|im_end|>" in render_chat_template(asked_again, model_type="qwen3")
    answered = render_chat_template([*asked_again, answer], model_type="qwen3", add_generation_prompt=False)
    assert answered.count("Hm.") == 1
    assert answered.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "mistral", "ministral3"])
def test_turns_that_must_alternate(model_type: str) -> None:
    with pytest.raises(ValueError, match=r"refuses these messages: .*onversation roles must alternate"):
        render_chat_template(CHATS["user"] * 2, model_type=model_type)


# By Mistral's own mistral-common 1.13, and with the templates in the models' files.
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": " Four."},
    {"role": "user", "content": " b é\n"},
]
RENDERED = {
    "mistral": "<s>[INST]a[/INST] Four.</s>[INST] b é\n[/INST]",
    "ministral3": "<s>[INST]a[/INST] Four.</s>[INST] b é\n[/INST]",
    "phi3": "<|user|>\na<|end|>\n<|assistant|>\n Four.<|end|>\n<|user|>\n b é\n<|end|>\n<|assistant|>\n",
    "gemma2": (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n"
        "<start_of_turn>user\nb é<end_of_turn>\n<start_of_turn>model\n"
    ),
    "qwen2": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n Four.<|im_end|>\n<|im_start|>user\n b é\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
}


@pytest.mark.parametrize("model_type", RENDERED)
def test_turns_of_a_family(model_type: str) -> None:
    assert render_chat_template(TURNS, model_type=model_type) == RENDERED[model_type]


def test_mistral_puts_the_system_message_into_the_last_turn() -> None:
    chat = [{"role": "system", "content": "S"}, *TURNS]
    assert render_chat_template(chat, model_type="mistral") == "<s>[INST]a[/INST] Four.</s>[INST]S\n\n b é\n[/INST]"


def test_gemma3_calls_the_assistant_model() -> None:
    assert "<start_of_turn>model\nTwo<end_of_turn>" in render_chat_template(CHATS["turns"], model_type="gemma3")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], r"needs a role and a content; this one has \['role'\]"),
        ([{"content": "x"}], r"this one has \['content'\]"),
    ],
)
def test_unusable_messages(chat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(CHATML, chat)


def test_templates_that_refuse() -> None:
    chat = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ValueError, match="refuses these messages: Conversation roles must alternate"):
        render(LLAMA2, chat)


def test_no_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        render(None, CHATS["user"])
    with pytest.raises(ValueError, match=r"model_type 'gpt2': .*llama, qwen3, qwen2"):
        render_chat_template(CHATS["user"], model_type="gpt2")
    with pytest.raises(ValueError, match="model_type None"):
        render_chat_template(CHATS["user"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "cannot be read"),
        ("{% generation %}", "cannot be read"),
        ("{{ undefined.attribute }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),  # the sandbox: templates come from strangers
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
    ],
)
def test_broken_and_hostile_templates(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(template, CHATS["user"])


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_given_by_name_or_file(tmp_path: Path, form: str) -> None:
    """Instead of the checkpoint's own, and for one without any."""
    path, file, own = save_folder(reference_model(), tmp_path / "m"), tmp_path / "x.jinja", "{{ messages[0].role }}"
    (path / "chat_template.jinja").write_text(own)
    if form == "gguf":
        metadata = byte_tokenizer_metadata() | {"tokenizer.chat_template": own}
        path = save_gguf(reference_model(), tmp_path / "m.gguf", metadata=metadata)
    file.write_text(CHATML)
    assert infer.Tokenizer(path).chat_template == own
    assert infer.Tokenizer(path, chat_template="chatml").chat_template == TEMPLATES["chatml"]
    given = infer.Tokenizer(path, chat_template=file)
    assert given.chat_template == CHATML
    assert given.encode_chat(CHATS["user"]) == given.encode(render(CHATML, CHATS["user"]), add_special_tokens=False)
    with infer.LLM(path, chat_template="phi3", cache_memory=10**6) as llm:
        assert llm.tokenizer.chat_template == TEMPLATES["phi3"]
        with pytest.raises(TypeError, match=r"Tokenizer\(name, chat_template=...\)"):
            infer.LLM(llm.model, given, chat_template="phi3")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "there is no file"),
        (b"{% for %}", "the chat template cannot be read: "),
        (b"\xff", "is not UTF-8 text"),
        (b"{{ 'a' " + b"(" * 5000, "the chat template cannot be read: "),
    ],
)
def test_given_templates_that_are_none(tmp_path: Path, contents: bytes | None, message: str) -> None:
    """Refused before the checkpoint is looked for, with the names that there are."""
    if contents is not None:
        (tmp_path / "x").write_bytes(contents)
    with pytest.raises(ValueError, match=f"a Jinja file or one of llama, .*, chatml, llama3, .*: .*{message}"):
        infer.Tokenizer(tmp_path / "missing", chat_template=tmp_path / "x")


def test_a_given_template_is_not_rendered_when_it_is_read(tmp_path: Path) -> None:
    """It may refuse whatever messages there are at that time."""
    (tmp_path / "x").write_text("{{ raise_exception('no') }}")
    assert chat_module.read_chat_template(tmp_path / "x") == "{{ raise_exception('no') }}"


# The process that renders


def helper() -> int:
    assert chat_module._process._process is not None
    return chat_module._process._process.pid


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "was stopped: it takes too long"),
        ("{{ 3 ** (10 ** 8) }}", "was stopped: it takes too long"),  # one operation in C
        ("{{ 'a' * 2000000000 }}", "was stopped: it takes more than 128 MB"),
        ("{{ 'a' * 300000 }}", "was stopped: its prompt has 300,000 characters, of at most 26.,..."),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses these messages: it nests too deep"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read: it nests too deep"),
        ("{{ raise_exception('a\n\x1b[2J' * 999) }}", r"refuses these messages: a  \[2Ja  \[2J.{1,290}$"),
    ],
)
def test_bounds(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(template, CHATS["user"])
    assert render("{{ messages[0].content }}", CHATS["user"]) == CHATS["user"][0]["content"]
    peak = next(line for line in Path(f"/proc/{helper()}/status").read_text().splitlines() if "VmPeak" in line)
    assert int(peak.split()[1]) * 1024 < 1.1 * MEMORY


def test_bounds_grow_with_the_chat() -> None:
    chat = [{"role": "user", "content": "long" * 1_000_000}]
    assert render("{% for i in range(2) %}{{ messages[0].content }}{% endfor %}", chat) == chat[0]["content"] * 2


def test_one_process_renders_all() -> None:
    assert len({(render(CHATML, CHATS["user"]), helper()) for _ in range(3)}) == 1


def test_a_process_that_ended_is_replaced() -> None:
    expected, before = render(CHATML, CHATS["user"]), helper()
    os.kill(before, signal.SIGKILL)
    while chat_module._process._process is not None and chat_module._process._process.poll() is None:
        time.sleep(0.01)
    assert render(CHATML, CHATS["user"]) == expected
    assert helper() != before


def test_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    render(CHATML, CHATS["user"])
    os.kill(helper(), signal.SIGSTOP)
    monkeypatch.setattr(limited_process, "WAIT", 0.2)
    with pytest.raises(ValueError, match="its process ended with status -9"):
        render(CHATML, CHATS["user"])


def test_interrupted() -> None:
    """The reply to a question that was given up is not taken for the next one's."""
    render(CHATML, CHATS["user"])

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    def render_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        render(ENDLESS, CHATS["user"])

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            render_interrupted()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert render("{{ messages[0].role }}", CHATS["user"]) == "user"


def test_a_forked_process_has_its_own() -> None:
    render(CHATML, CHATS["user"])
    before = helper()
    child = os.fork()
    if child == 0:
        text = render("{{ messages[0].role }}", CHATS["user"])
        os._exit(0 if text == "user" and helper() != before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render("{{ messages[0].role }}", CHATS["user"]) == "user"
    assert helper() == before


@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_it_ends_with_its_parent(end: str) -> None:
    code = (
        "from infer.loader import chat\n"
        "chat.render_chat_template([{'role': 'user', 'content': 'x'}], model_type='llama')\n"
        f"print(chat._process._process.pid, flush=True)\n{end}"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    status = Path(f"/proc/{done.stdout.strip()}/status")
    until = time.monotonic() + 300
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_json_cannot_hold() -> None:
    message = UserDict(role="user", content=("a", "b"))
    assert render("{{ messages[0].content | join }}{{ messages[0].role }}", [message]) == "abuser"
    with pytest.raises(ValueError, match="must be JSON values: object is not"):
        render(CHATML, CHATS["user"], tools=[object()])

"""Keys and values are used by the model that computed them alone: a changed model starts afresh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mocks import Letters
from tiny import make_tiny_config, make_tiny_model
from torch import Tensor, nn

from infer import LLM, CacheMemory, SamplingParams, generate, stream
from infer.backend import ModelVersion, backend_for
from infer.backend.fingerprint import fingerprint
from infer.backend.parts import UnsupportedByKernels
from infer.cache import BaseCache, GrowingCache, KVCache, NoCache, SlidingCache
from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.models.common import Decoder

PROMPT = [5, 9, 3, 22, 60, 7, 7, 1, 33, 12, 40, 2, 18, 4, 50, 6, 21]
PARAMS = SamplingParams(max_new_tokens=4, logprobs=0)
PAGE = 4
LETTERS = Letters()


class Plain(nn.Module):
    """A layer of attention in torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = make_tiny_config(num_hidden_layers=1)
        self.embed, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, kv_cache: Any = None, *, all_logits: bool = False) -> Tensor:
        cache = NoCache(len(input_ids)) if kv_cache is None else kv_cache
        n = input_ids.shape[1]
        heads = self.qkv(self.embed(input_ids)).unflatten(2, (8, 8)).transpose(1, 2)  # [B, H, n, D]
        cache.reserve(n)
        x = cache.attend(0, *heads.split((4, 2, 2), 1), scale=1.0)
        cache.advance(n)
        return self.head(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def refuse(_: Decoder) -> None:
    raise UnsupportedByKernels("a test")


def negate(_: Any, args: Any, out: Tensor) -> Tensor:
    return -out


def scaled(model: Decoder) -> None:
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(-1)


def loaded(model: Decoder) -> None:
    model.load_state_dict(make_tiny_model(seed=5).state_dict())


def replaced(model: Decoder) -> None:
    model.layers[0].mlp = make_tiny_model(seed=5).layers[0].mlp


def replaced_layer(model: Decoder) -> None:
    model.layers[0] = make_tiny_model(seed=5).layers[0]


def other_data(model: Decoder) -> None:
    weight = model.layers[0].mlp.down_proj.weight
    weight.data = -weight.data


def attribute(model: Decoder) -> None:
    model.layers[0].mlp.activation = "gelu"


def hooked(model: Decoder) -> None:
    model.layers[0].mlp.register_forward_hook(negate)


def hooked_first(model: Decoder) -> None:
    model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * 3, *args[1:]))


def trained(model: Decoder) -> None:
    weight = model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1.0, fused=True).step()
    weight.requires_grad_(False)


CHANGES = [trained, scaled, loaded, replaced, replaced_layer, other_data, attribute, hooked, hooked_first]


def llm_of(model: Any, **options: Any) -> LLM:
    return LLM(model, LETTERS, memory=CacheMemory(model, 10**6, page_size=PAGE, **options))


def check_equal(one: Any, other: Any) -> None:
    """Within the rounding of plain torch."""
    assert one.token_ids == other.token_ids
    assert [each.logprob for each in one.logprobs] == pytest.approx([each.logprob for each in other.logprobs], abs=1e-3)


def check_generated(llm: LLM, cached: int) -> None:
    result = llm.generate(PROMPT, PARAMS)
    assert result.num_cached_tokens == cached
    check_equal(result, generate(llm.model, LETTERS, PROMPT, PARAMS))


def check_fresh_start(model: Any, change: Callable[[Any], Any]) -> None:
    """The prefix cache is used before and after the change, not across it."""
    with llm_of(model) as llm:
        check_generated(llm, 0)
        check_generated(llm, len(PROMPT) - 1)
        change(model)
        check_generated(llm, 0)
        check_generated(llm, len(PROMPT) - 1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kernels", [True, False])
def test_a_changed_model_starts_afresh(
    change: Callable[[Decoder], None], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr("infer.backend._with_kernels", refuse)
    check_fresh_start(make_tiny_model(), change)


@pytest.mark.parametrize("change", [scaled, replaced, hooked])
@pytest.mark.parametrize("kind", [KVCache, SlidingCache, GrowingCache])
def test_a_cache_of_the_caller_starts_afresh(change: Callable[[Decoder], None], kind: type[BaseCache]) -> None:
    model = make_tiny_model()
    cache = kind.from_model_config(model.config, 64, dtype="float32", device="cpu")
    generate(model, LETTERS, PROMPT, PARAMS, cache=cache)
    change(model)
    check_equal(
        generate(model, LETTERS, PROMPT, PARAMS, cache=cache),
        generate(model, LETTERS, PROMPT, PARAMS, use_kv_cache=False),
    )


def test_a_hook_that_is_removed() -> None:
    """Another hook is another state, too."""
    model = make_tiny_model()
    with llm_of(model) as llm:
        hook = model.layers[0].register_forward_hook(negate)
        check_generated(llm, 0)
        hook.remove()
        check_generated(llm, 0)
        hook = model.layers[0].register_forward_hook(negate)
        check_generated(llm, 0)
        hook.remove()
        model.layers[0].register_forward_hook(lambda _, args, out: out * 2)
        check_generated(llm, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.embed.register_forward_hook(negate),
        lambda model: model.qkv.register_forward_pre_hook(lambda _, args: (-args[0],)),
        lambda model: model.embed.weight.detach().mul_(-1),
        lambda model: setattr(model, "embed", nn.Embedding(64, 32)),
        lambda model: setattr(model.embed, "weight", nn.Parameter(torch.ones(64, 32))),
    ],
)
def test_plain_torch(change: Callable[[Plain], Any]) -> None:
    check_fresh_start(Plain(), change)


class Duck:
    """A model that is no module."""

    def __init__(self) -> None:
        self.model = Plain()
        self.config, self.parameters = self.model.config, self.model.parameters

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return self.model(*args, **options)  # type: ignore[no-any-return]


def test_a_model_that_is_no_module() -> None:
    duck = Duck()
    with llm_of(duck) as llm:
        check_generated(llm, 0)
        check_generated(llm, len(PROMPT) - 1)
        duck.model.embed.weight.detach().mul_(-1)
        check_generated(llm, 0)


def test_the_version() -> None:
    model, other = make_tiny_model(), make_tiny_model()
    version, of_other = ModelVersion(model), ModelVersion(other)
    first = version.number()
    other.layers[0].mlp.activation = "gelu"
    assert len({first, version.number(), of_other.number(), of_other.number()}) == 2
    copy.deepcopy(model)
    model.eval()
    generate(model, LETTERS, PROMPT, PARAMS)
    assert version.number() == first
    with torch.inference_mode():
        model.norm.weight.mul_(2)
    assert version.number() != first


def test_weights_without_a_version() -> None:
    """Those made in inference mode: the others, hooks and modules are still looked at."""
    with torch.inference_mode():
        model = make_tiny_model()
    version = ModelVersion(model)
    first = version.number()
    assert version.number() == first
    model.layers[0].register_forward_hook(negate)
    assert version.number() != first


def test_a_sequence_on_its_way() -> None:
    """It goes on, with what it has computed; its pages are not for others."""
    model = make_tiny_model()
    memory = CacheMemory(model, 10**6, page_size=PAGE)
    with Engine(model, memory, prefill_chunk=PAGE) as engine:
        first = Sequence(model.config, LETTERS, PROMPT, PARAMS)
        engine.submit(first)
        engine.step()
        assert memory.index.num_pages == 1
        scaled(model)
        second = Sequence(model.config, LETTERS, [1, 2, 3], PARAMS)
        engine.submit(second)
        while not engine.is_idle:
            engine.step()
        assert first.error is None is second.error
        assert first.num_tokens == len(PROMPT) + PARAMS.max_new_tokens
        found = memory.index.match(PROMPT)
        assert found.length == 0
        third = Sequence(model.config, LETTERS, PROMPT, PARAMS)
        engine.submit(third)
        while not engine.is_idle:
            engine.step()
    check_equal(third.result(), generate(model, LETTERS, PROMPT, PARAMS))


def test_a_change_before_the_pages_are_written(tmp_path: Path) -> None:
    """A file outlives the change: it must not hold the pages of one model under the name of another."""
    model = make_tiny_model()
    before = copy.deepcopy(model)
    memory = CacheMemory(model, 10**6, page_size=PAGE, store=tmp_path)
    with Engine(model, memory) as engine:
        sequence = Sequence(model.config, LETTERS, PROMPT, PARAMS)
        engine.submit(sequence)
        engine.allocator.memory.key  # type: ignore[union-attr] # noqa: B018
        scheduled = engine.scheduler.schedule()
        scaled(model)
        for output in [*engine.runner.launch(scheduled), *engine.runner.wait()]:
            engine._commit(output, 0.0)
        assert not list(tmp_path.iterdir())
        while not engine.is_idle:
            engine.step()
    assert not list(tmp_path.iterdir())
    for each in (model, before):
        with llm_of(each, store=tmp_path) as llm:
            check_generated(llm, 0)
    for each in (model, before):
        with llm_of(each, store=tmp_path) as llm:
            check_generated(llm, len(PROMPT) - 1)


def test_a_session_goes_on(tmp_path: Path) -> None:
    model = make_tiny_model()
    with llm_of(model) as llm:
        chat = llm.session(encode=lambda messages: [len(each["content"]) for each in messages] * 9, params=PARAMS)
        chat.send("hello")
        chat.save(tmp_path / "chat")
        scaled(model)
        with pytest.raises(ValueError, match="another model"):
            llm.load_session(tmp_path / "chat", encode=chat.encode)
        result = chat.send("again")
        check_equal(result, generate(model, LETTERS, result.prompt_token_ids, PARAMS))
        chat.save(tmp_path / "chat")
        twin = llm.load_session(tmp_path / "chat", encode=chat.encode)
        check_equal(twin.send("x"), chat.send("x"))


@pytest.mark.parametrize("kernels", [True, False])
def test_a_hook_during_a_stream(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step calls it; once it is removed, no step does."""
    if not kernels:
        monkeypatch.setattr("infer.backend._with_kernels", refuse)
    model, seen = make_tiny_model(), []
    tokens = stream(model, LETTERS, PROMPT, SamplingParams(max_new_tokens=9))
    next(tokens)
    hook = model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    for count in (1, 2):
        next(tokens)
        assert len(seen) == count
    hook.remove()
    with torch.inference_mode():
        unhooked = backend_for(model)
    assert unhooked.name == ("cpu" if kernels else "torch")
    assert len(list(tokens)) == 6
    assert len(seen) == 2


def test_what_a_hook_changes_during_a_stream() -> None:
    model = make_tiny_model()
    tokens = stream(model, LETTERS, PROMPT, SamplingParams(max_new_tokens=3))
    next(tokens)
    model.lm_head.register_forward_hook(
        lambda _, args, out: torch.full_like(out, -1).index_fill_(-1, torch.tensor(7), 1)
    )
    assert [token.token_id for token in tokens] == [7, 7]


def test_a_forward_that_is_replaced() -> None:
    """Its code cannot be hashed, and an object in its place may get its id."""
    model = make_tiny_model()
    before = fingerprint(model)
    with llm_of(model) as llm:
        versions = [llm.memory.version]
        for factor in (2.0, 3.0):
            model.layers[0].mlp.forward = lambda x, factor=factor: x * factor  # type: ignore[method-assign]
            check_generated(llm, 0)
            versions.append(llm.memory.version)
            assert fingerprint(model) != before
            del model.layers[0].mlp.forward
        check_generated(llm, 0)
    assert len(set(versions)) == 3
    assert fingerprint(model) == before


def test_hooks_that_are_cleared() -> None:
    model = make_tiny_model()
    with llm_of(model) as llm:
        hooked(model)
        check_generated(llm, 0)
        model.layers[0].mlp._forward_hooks.clear()
        check_generated(llm, 0)
        assert llm.between_steps(lambda engine: engine.runner._choose_backend().name).result() == "cpu"


def test_a_hook_that_is_removed_before_the_next_request() -> None:
    """Pages of a run with it are not those of the model without it."""
    model = make_tiny_model()
    with llm_of(model) as llm:
        hooks = []

        def listen(event: Any) -> None:
            if event.kind == "step" and not hooks:
                hooks.append(model.layers[0].mlp.register_forward_hook(negate))

        stop = llm.watch(listen)
        llm.generate(PROMPT[:5], SamplingParams(max_new_tokens=12, ignore_eos=True))
        stop()
        hooks[0].remove()
        tokens = llm.generate(PROMPT[:5], SamplingParams(max_new_tokens=12, ignore_eos=True))
        check_equal(
            llm.generate(PROMPT[:5], SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0)),
            generate(model, LETTERS, PROMPT[:5], SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0)),
        )
        assert tokens.num_cached_tokens == 0

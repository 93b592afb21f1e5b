"""`infer verify` finds what it should: nothing where all bits agree, and the very place where one does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run, assert_refused
from mocks import CACHES, Letters
from terminal import Terminal
from torch import Tensor, nn

from infer import GrowingCache, ModelConfig, SlidingCache, generate, generate_batch
from infer.backend import Row
from infer.backend.cpu import backend as cpu_backend
from infer.backend.plain import TorchBackend
from infer.cache import BaseCache, Cache, NoCache, PagedCache
from infer.cli.verify import time_left
from infer.evaluate import paths
from infer.evaluate import verify as module
from infer.evaluate.divergence import Divergence, bits
from infer.evaluate.paths import Comparison, PathResult
from infer.evaluate.verify import first_difference, why_plain_torch, with_long_prompt
from infer.models.common import Decoder

SLOW_PATHS = """
import time
from infer.evaluate.paths import Comparison
compare = Comparison._compare_logits
Comparison._compare_logits = lambda *args: time.sleep(0.1) or compare(*args)
"""

PROMPTS = [[5, 9, 2], list(range(20)), [33, 7, 7, 1, 30, 2, 8, 9, 40]]
NEW = 5
WINDOW = 6
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": WINDOW}


class ExactModel:
    """All its numbers are integers, and values are 0, so that no sum depends on the order.

    `plant` may change what a layer sees: (layer, what, numbers [B, n, ...], positions [B, n], cache) -> numbers.
    """

    def __init__(self, config: ModelConfig, plant: Callable[..., Tensor] | None = None) -> None:
        self.config = config
        self.plant = plant or (lambda layer, what, x, positions, cache: x)
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls = 0

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter([self.weight])

    def __call__(self, input_ids: Tensor, kv_cache: Cache | None = None, *, all_logits: bool = False) -> Tensor:
        self.calls += 1
        config = self.config
        cache = NoCache(len(input_ids)) if kv_cache is None else kv_cache
        positions = cache.positions(input_ids.shape[1])
        x = (input_ids * 7 + positions * 3) % 11  # [B, n]
        for layer in range(config.num_hidden_layers):
            shape = (config.num_key_value_heads, config.computed_head_dim)
            heads = (x[..., None] * (layer + 1) + torch.arange(shape[0] * shape[1])).float().view(*x.shape, *shape)
            key = self.plant(layer, "key", heads, positions, cache).transpose(1, 2)  # [B, H, n, D]
            q = key.repeat_interleave(config.num_attention_heads // shape[0], 1)
            out = cache.attend(layer, q, key, torch.zeros_like(key), scale=1.0, window=config.window(layer))
            x = (x + out.sum((1, 3))).long()
        cache.advance(input_ids.shape[1])
        logits = ((x[..., None] + torch.arange(config.vocab_size) * 5) % 61).float()
        logits = self.plant(config.num_hidden_layers, "logits", logits, positions, cache)
        return logits if kv_cache is None or all_logits else logits[:, -1:]


RESUMED = [f"PagedCache, {how}" for how in ("prefix hit", "evicted", "forked", "saved and loaded")]


@pytest.fixture
def config(tiny_config: Callable[..., ModelConfig]) -> ModelConfig:
    kinds = ("sliding_attention", "full_attention", "full_attention")
    return tiny_config(num_hidden_layers=3, layer_types=kinds, sliding_window=WINDOW)


def check(model: Any, prompts: list[list[int]] = PROMPTS, **options: Any) -> dict[str, PathResult]:
    comparison = Comparison(model, Letters(), prompts, NEW, **options)
    results = list(comparison)
    assert len(results) == len(comparison)
    found = {result.path: result for result in results}
    assert len(found) == len(results)
    return found


def result_of(path: str, model: Any, prompts: list[list[int]] = PROMPTS) -> PathResult:
    """Of one path; those after it do not run."""
    return next(result for result in Comparison(model, Letters(), prompts, NEW) if result.path == path)


def single_row_is_other(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
    """Layer 1 adds a thousandth where more than one row is fed."""
    return x + 1e-3 if (layer, what) == (1, "key") and positions.numel() > 1 else x


class TestEqual:
    def test_every_path(self, config: ModelConfig) -> None:
        threads = torch.get_num_threads()
        found = check(ExactModel(config), threads=[1])
        assert torch.get_num_threads() == threads  # put back
        names = [cls.__name__ for cls in CACHES]
        assert list(found) == [
            "no cache, stopped early",
            *(f"{name}{chunk}" for name in names for chunk in ("", ", chunks of 1", ", chunks of 7")),
            *(f"{name}, truncated" for name in names),
            *RESUMED,
            "default cache, only the last logits",
            "default cache, traced",
            "no cache, traced",
            "default cache, batch of 3",
            "default cache, batch of 3, in turn",
            "KVCache of 3 rows",
            "KVCache, 1 thread",
            "generate",
            "generate_batch",
            *(f"sampled, {name}" for name in names),
            "sampled, chunks of 7",
            "sampled, traced",
            "sampled, generate_batch",
            "sampled, busy server",
        ]
        assert all(result.equal and result.difference is None for result in found.values())

    def test_what_is_compared(self, config: ModelConfig) -> None:
        found = check(ExactModel(config))
        everything = sum(len(prompt) + NEW for prompt in PROMPTS)
        assert found["KVCache"].positions == found["KVCache, chunks of 1"].positions == everything
        assert (found["KVCache, chunks of 7"].prompts, found["KVCache, chunks of 7"].positions) == (2, 20 + 9 + 2 * NEW)
        assert found["default cache, only the last logits"].positions == 3 * (1 + NEW)
        assert found["default cache, batch of 3"].positions == everything
        assert found["default cache, batch of 3, in turn"].positions == everything
        assert found["KVCache of 3 rows"].positions == 3 * (3 + NEW)
        assert found["generate"].positions == found["generate_batch"].positions == 3 * NEW
        for name in ("KVCache, truncated", "no cache, stopped early"):
            assert found[name].positions > everything

    def test_chunks_of_512(self, tiny_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch) -> None:
        assert paths.CHUNKS == (1, 7, 64, 512)
        monkeypatch.setattr(paths, "CHUNKS", (64, 512, 513))
        model = ExactModel(tiny_config(max_position_embeddings=1024))
        found = check(model, [[i % 64 for i in range(513)]])
        assert found["SlidingCache, chunks of 512"].positions == 513 + NEW
        assert found["SlidingCache, chunks of 64"].equal
        assert "SlidingCache, chunks of 513" not in found
        assert "generate_batch" not in found

    def test_references_that_are_not_kept(self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = check(ExactModel(config), PROMPTS[:1])
        monkeypatch.setattr(paths, "MAX_KEPT_BYTES", 0)
        assert check(ExactModel(config), PROMPTS[:1]) == kept

    def test_int8(self, config: ModelConfig) -> None:
        assert all(result.equal for result in check(ExactModel(config), cache_dtype="int8").values())

    def test_refused_before_work(self, config: ModelConfig) -> None:
        model = ExactModel(config)
        with pytest.raises(ValueError, match="token id 64 in the prompt"):
            check(model, [[1], [64]])
        assert not model.calls


class TestDifferences:
    def test_layer_and_position(self, config: ModelConfig) -> None:
        """Whatever decodes a single token differs from the pass over all; and it is layer 1's keys."""

        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            changed = single_row_is_other(layer, what, x, positions, cache)
            if what == "logits":  # what a layer's keys would do to them
                return x + 0.5 * (positions.numel() > 1)
            return changed

        found = check(ExactModel(config, plant))
        result = found["KVCache"]
        assert (result.different, result.largest) == (3 * NEW, 0.5)
        difference = result.difference
        assert difference is not None
        assert (difference.prompt, difference.position, difference.what, difference.element) == (0, 3, "logits", 0)
        assert difference.got + 0.5 == difference.expected
        divergence = difference.divergence
        assert divergence is not None
        assert (divergence.layer, divergence.what, divergence.position, divergence.element) == (1, "query", 3, 0)
        assert divergence.expected == pytest.approx(divergence.got + 1e-3)
        assert str(divergence).startswith("layer 1, query, position 3, element 0: ")
        assert "position 3, logits 0: " in str(difference)
        # All rows in one cache, and all at once, are more than one.
        assert found["no cache, traced"].equal
        assert found["KVCache of 3 rows"].equal

    @pytest.mark.parametrize("kind", CACHES)
    def test_a_kind_of_cache(self, config: ModelConfig, kind: type[BaseCache]) -> None:
        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            while hasattr(cache, "cache"):
                cache = cache.cache
            if not isinstance(cache, kind) or (layer, what) not in ((2, "key"), (3, "logits")):
                return x
            late = (positions >= 4).view(*positions.shape, *[1] * (x.dim() - 2))
            return torch.where(late, x + 1, x)

        found = check(ExactModel(config, plant), PROMPTS[1:2])
        wrong = {name for name, result in found.items() if not result.equal}
        own = {name for name in found if name.startswith(kind.__name__)}
        default = {name for name in found if name.startswith("default cache")} if kind is SlidingCache else set()
        assert wrong - {"generate"} == own | default
        for name in own - set(RESUMED):  # these start after position 4
            difference = found[name].difference
            assert difference is not None
            assert difference.position == 4
            assert difference.divergence is not None
            assert (difference.divergence.layer, difference.divergence.what) == (2, "query")
            assert difference.divergence.position == 4

    def test_one_row_of_a_batch(self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of three in one cache, and of three with a cache each."""
        place, called = [(0, 0)], TorchBackend.run

        def run(backend: TorchBackend, rows: Sequence[Row]) -> list[Tensor]:
            logits = []
            for i, row in enumerate(rows):
                place[0] = len(rows), i
                logits += called(backend, [row])
            return logits

        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            if positions.shape[1] != 1 or (layer, what) not in ((0, "key"), (3, "logits")):
                return x
            x = x.clone()
            if len(x) == 3:
                x[2] += 1
            elif place[0] == (3, 2):
                x += 1
            return x

        monkeypatch.setattr(TorchBackend, "run", run)
        found = check(ExactModel(config, plant))
        wrong = {name for name, result in found.items() if not result.equal}
        ragged = ["default cache, batch of 3", "default cache, batch of 3, in turn"]
        assert wrong - {"generate_batch"} == {*ragged, "KVCache of 3 rows"}
        for name, position in (*((name, 9) for name in ragged), ("KVCache of 3 rows", 4)):
            difference = found[name].difference
            assert difference is not None
            assert (difference.prompt, difference.position) == (2, position)
            assert difference.divergence is not None
            assert (difference.divergence.layer, difference.divergence.position) == (0, position)

    def test_the_head(self, config: ModelConfig) -> None:
        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            if what == "logits" and positions.shape[1] == 1:
                x = x.clone()
                x[..., 17] = -1.0
            return x

        difference = next(iter(Comparison(ExactModel(config, plant), Letters(), [[1, 2, 3]], 4))).difference
        assert difference is not None
        assert (difference.position, difference.element, difference.divergence) == (0, 17, Divergence("head"))
        assert "head" in str(difference.divergence)

    def test_only_while_unwatched(self, config: ModelConfig) -> None:
        """A recording cache has no table, so that the fused step does not run."""

        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            return x + 1 if what == "logits" and type(cache) is GrowingCache else x

        difference = result_of("GrowingCache", ExactModel(config, plant)).difference
        assert difference is not None
        assert difference.divergence == Divergence("fused step")
        assert "in one call" in str(difference.divergence)

    def test_another_token(self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        def other(*args: Any, **options: Any) -> list[Any]:
            results = generate_batch(*args, **options)
            results[1].token_ids[2] = (results[1].token_ids[2] + 1) % 64
            return results

        monkeypatch.setattr(paths, "generate_batch", other)
        found = check(ExactModel(config))
        result = found["generate_batch"]
        assert (result.different, result.positions) == (1, 3 * NEW - 2)  # what follows is another text
        assert result.difference is not None
        assert (result.difference.prompt, result.difference.position, result.difference.what) == (1, 22, "token")
        assert found["generate"].equal

    def test_nothing_is_run_again_where_bits_are_not_promised(self, config: ModelConfig) -> None:
        result = check(ExactModel(config, single_row_is_other), diagnose=False)
        assert all(found.difference is None or found.difference.divergence is None for found in result.values())

    def test_another_sampled_text(self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        def other(*args: Any, **options: Any) -> Any:
            result = generate(*args, **options)
            if "trace" in options:
                result.token_ids[2] = (result.token_ids[2] + 1) % 64
            return result

        monkeypatch.setattr(paths, "generate", other)
        found = check(ExactModel(config))
        assert {name for name, result in found.items() if not result.equal} == {"sampled, traced"}
        result = found["sampled, traced"]
        assert (result.different, result.positions, result.other_tokens) == (3, 3 * NEW, 0)
        assert result.difference is not None
        assert (result.difference.prompt, result.difference.position) == (0, 5)
        assert "position 5, token " in str(result.difference)

    @pytest.mark.parametrize(("by", "others"), [(1e-4, 0), (3.0, 3 * NEW)])
    def test_other_top_tokens(self, config: ModelConfig, by: float, others: int) -> None:
        """Two tokens as likely as each other, of which the other comes first: a near-tie, or not."""

        def plant(layer: int, what: str, x: Tensor, positions: Tensor, cache: Cache) -> Tensor:
            if what != "logits":
                return x
            x = x.clone()
            x[..., 3] = 100.0
            x[..., 5] = 100.0 + (by if positions.shape[1] == 1 else -by)
            return x

        result = result_of("KVCache", ExactModel(config, plant), [prompt for prompt in PROMPTS if len(prompt) > 1])
        assert (result.different, result.other_tokens) == (3 * NEW, others)
        assert result.largest == pytest.approx(2 * by, abs=1e-4)


class TestDrafts:
    NAMES = ("PagedCache, drafts", "sampled, busy server, drafts")
    NEW = 24

    def found(self, model: Decoder, **options: Any) -> dict[str, PathResult]:
        paths = Comparison(model, Letters(), PROMPTS, self.NEW, **options).paths
        return {path.name: path.check(path.name) for path in paths if path.name.endswith("drafts")}

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_some_are_right(
        self, tiny_model: Callable[..., Decoder], family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []

        class Noted(paths.Drafted):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                made.append(self)

        monkeypatch.setattr(paths, "Drafted", Noted)
        found = self.found(tiny_model(model_type=family))
        assert tuple(found) == self.NAMES
        for result in found.values():
            assert (result.positions, result.different) == (3 * self.NEW, 0)
        assert len(made) == 2 * len(PROMPTS)
        for sequence in made:
            assert sequence.num_tokens == sequence.max_len
            assert 0 < sequence.num_accepted < sequence.num_drafted

    def test_only_where_they_are_verified(
        self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpu_backend, "kernels", lambda: None)
        assert self.found(tiny_model()) == {}

    def test_a_pass_with_drafts_differs(
        self, tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From position 20 on, in layer 1. Rejected tokens before it are not taken for the cause."""
        attend = PagedCache.attend

        def other(cache: PagedCache, layer_idx: int, q: Tensor, *args: Any, **options: Any) -> Tensor:
            out = attend(cache, layer_idx, q, *args, **options)
            wrong = layer_idx == 1 and 1 < q.shape[2] <= 9 and cache.seq_len >= 20
            return out * 1.5 if wrong else out

        monkeypatch.setattr(PagedCache, "attend", other)
        monkeypatch.setattr(PagedCache, "table", lambda *_: None)  # kernels would not ask `attend`
        logits, texts = self.found(tiny_model()).values()
        assert not texts.equal
        difference = logits.difference
        assert difference is not None
        assert difference.prompt == 0
        assert difference.divergence is not None
        assert (difference.divergence.layer, difference.divergence.what) == (1, "attended")
        assert difference.divergence.position == difference.position >= 20


class TestBits:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_all_of_them(self, dtype: torch.dtype) -> None:
        x = torch.tensor([1.0, torch.nan, 0.0, torch.inf], dtype=dtype)
        assert torch.equal(bits(x), bits(x.clone()))
        assert (bits(x) != bits(torch.tensor([1.0, torch.nan, -0.0, torch.inf], dtype=dtype))).tolist() == [0, 0, 1, 0]
        next_up = torch.nextafter(x[:1].float(), torch.tensor(2.0)).to(dtype)
        assert (bits(next_up) == bits(x[:1])).item() == (dtype in (torch.bfloat16, torch.float16))


class TestCommand:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Path:
        file = tmp_path / "prompts.txt"
        file.write_text("hello\nonce upon a time")
        return file

    def found(self, monkeypatch: pytest.MonkeyPatch, *results: PathResult) -> list[dict[str, Any]]:
        """Let the command find this."""
        asked: list[dict[str, Any]] = []

        def compare(*args: Any, **options: Any) -> Sequence[PathResult]:
            asked.append(options | {"prompts": len(args[2]), "new": args[3]})
            return results

        monkeypatch.setattr(paths, "Comparison", compare)
        return asked

    EQUAL = PathResult("KVCache", 2, 40)
    DIVERGENCE = Divergence("key", 1, 3, 12, 0.5, 0.75)
    OTHER = PathResult("GrowingCache", 2, 40, 7, 0.25, 2, paths.Difference(1, 5, "logits", 17, 1.5, 1.25, DIVERGENCE))

    def test_equal(self, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.found(monkeypatch, self.EQUAL)
        done = run("verify", "--prompts", prompts, "--max-new-tokens", "4", "--also-threads", "1", "--all")
        settings = {"seed": 0, "cache_dtype": "auto", "threads": [1], "diagnose": True}
        assert asked == [settings | {"prompts": 2, "new": 4}]
        promise, header, line = done.out.splitlines()
        assert promise == "kernels: every path must give the same bits"
        assert header.split() == ["path", "prompts", "positions"]
        assert line.split() == ["KVCache", "2", "40", "equal"]
        *_, path, total = done.err.splitlines()
        assert re.fullmatch(r"1/1 KVCache: equal, \d+\.\d s", path)  # stderr is no terminal
        assert total == "1 of 1 paths give the same bits as one pass without a cache"
        assert done.status == 0

    def test_other_bits(self, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found(monkeypatch, self.EQUAL, self.OTHER)
        done = run("verify", "--prompts", prompts)
        assert done.status == 1
        assert done.out.splitlines()[1:] == [
            f"{'GrowingCache':<38}       2        40  DIFFERS at 7 positions; first in "
            '"once upon a time", position 5, logits 17: 1.25 instead of 1.5',
            "    from layer 1, key, position 3, element 12: 0.75 instead of 0.5",
        ]
        assert "2/2 GrowingCache: DIFFERS, " in done.err
        assert "1 of 2 paths" in done.err

    def test_time_left(self) -> None:
        """By the paths after the first."""
        assert time_left([0, 100], 10) == ""
        assert time_left([0, 100, 102, 104], 10) == "about 14 s left"
        assert time_left([0, 100, 120, 140], 13) == "about 3 min left"
        assert time_left([0, 100, 102, 104], 3) == ""

    def test_on_a_terminal(self, folder: Path, prompts: Path) -> None:
        """A line that is drawn over, in place of a line for each path."""
        options = ("--prompts", prompts, "-n", "2", "--device", "cpu")
        with Terminal("verify", folder, *options, code=SLOW_PATHS, INFER_KERNELS="0") as terminal:
            assert terminal.ended() == 0
        drawn = [each for each in terminal.raw.split("\x1b[K") if each.startswith("\rpaths ")]
        assert any(each.endswith(" s left") for each in drawn)
        assert ": equal, " not in terminal.raw

    def test_interrupted(self, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What has been compared until then is said."""

        class Interrupted(list[PathResult]):
            def __iter__(self) -> Iterator[PathResult]:
                yield from super().__iter__()
                raise KeyboardInterrupt

        monkeypatch.setattr(paths, "Comparison", lambda *args, **options: Interrupted([self.EQUAL, self.OTHER]))
        done = run("verify", "--prompts", prompts)
        assert done.status == 130
        assert done.err.splitlines()[-1] == "stopped after 2 of 2 paths: 1 gave the same bits"

    def test_json(self, run: Run, folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found(monkeypatch, self.EQUAL, self.OTHER)
        output = json.loads(run("verify", "--prompts", prompts, "--json").out)
        assert (output["model"], output["kernels"], output["passed"]) == (str(folder), True, False)
        assert [path["equal"] for path in output["paths"]] == [True, False]
        difference = output["paths"][1]["difference"]
        assert (difference["prompt"], difference["divergence"]["layer"]) == ("once upon a time", 1)

    def test_a_longer_text_joins_the_built_in_ones(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.found(monkeypatch, self.EQUAL)
        assert run("verify", "--max-new-tokens", "4").status == 0
        assert asked[0]["prompts"] == 9

    @pytest.mark.parametrize("count", ["0", "99999"])
    def test_threads_are_checked(self, run: Run, count: str, untouched: None) -> None:
        assert_refused(run("verify", "--also-threads", count), "--also-threads must be from 1 to 256")

    CLOSE = PathResult("KVCache", 2, 40, 7, 0.25, 0, paths.Difference(1, 5, "logits", 17, 1.5, 1.25))
    WRONG = PathResult("GrowingCache", 2, 40, 7, 0.25, 2, paths.Difference(1, 5, "logits", 17, 1.5, 1.25))
    OTHER_TEXT = PathResult("sampled, traced", 2, 40, 1, 0.0, 0, paths.Difference(1, 5, "token", None, 3.0, 4.0))

    def test_without_kernels(self, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says so, and how far the paths are apart; only other tokens are an error."""
        monkeypatch.setattr(cpu_backend, "kernels", lambda: None)
        asked = self.found(monkeypatch, self.EQUAL, self.CLOSE, self.OTHER_TEXT)
        done = run("verify", "--prompts", prompts, "--all")
        assert asked[0]["diagnose"] is False
        promise, _, *lines = done.out.splitlines()
        why = "there are no kernels for this CPU: INFER_KERNELS=0, or numba is missing"
        assert promise == f"plain torch ({why}): paths agree within rounding"
        assert [line[58:] for line in lines] == [
            "equal",
            "differs by at most 2.5e-01, at 7 positions",
            '1 different tokens; first in "once upon a time", position 5, token 4 instead of 3',
        ]
        assert "the most likely token is the same everywhere, near-ties aside" in done.err
        assert done.status == 0
        self.found(monkeypatch, self.EQUAL, self.WRONG)
        done = run("verify", "--prompts", prompts)
        assert "DIFFERS at 7 positions; 2 different most likely tokens; first in" in done.out
        assert done.status == 1

    def test_a_model_is_loaded_for_it(self, run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """End to end on a small model."""
        done = run("verify", "--prompts", prompts, "--max-new-tokens", "2", "--json")
        output = json.loads(done.out)
        assert len(output["paths"]) == int(done.err.split(" paths to run")[0].split()[-1]) > 30
        assert all(path["equal"] for path in output["paths"])
        assert done.status == 0


class TestWhyPlainTorch:
    """What `infer verify` says instead of promising bits."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Decoder]) -> Decoder:
        return tiny_model()

    def test_kernels(self, tiny_model: Callable[..., Decoder]) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert why_plain_torch(tiny_model(dtype=dtype)) is None

    def test_no_kernels(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_backend, "kernels", lambda: None)
        why = "there are no kernels for this CPU: INFER_KERNELS=0, or numba is missing"
        assert why_plain_torch(model) == why

    def test_a_hook(self, model: Decoder) -> None:
        hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
        assert why_plain_torch(model) == "a module has a hook"
        hook.remove()
        assert why_plain_torch(model) is None

    def test_another_dtype(self, model: Decoder) -> None:
        assert why_plain_torch(model.double()) == "kernels do not compute in torch.float64"

    def test_another_device(self, tiny_model: Callable[..., Decoder]) -> None:
        assert why_plain_torch(tiny_model().to("meta")) == "there are no kernels for meta"


def test_every_cache_is_gone_through() -> None:
    assert list(module.CACHES) == CACHES


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 96),
        ({"sliding_window": 6}, 96),  # which no layer has
        ({"max_position_embeddings": 105}, None),
        (WINDOWS, 54),
        (WINDOWS | {"sliding_window": 198}, 246),  # the last that leaves room for 10 more
        (WINDOWS | {"sliding_window": 199}, None),
    ],
)
def test_a_longer_prompt(tiny_config: Callable[..., ModelConfig], changes: dict, length: int | None) -> None:
    prompts = with_long_prompt(tiny_config(**changes), PROMPTS, 10)
    assert prompts[:3] == PROMPTS
    if length is None:
        assert len(prompts) == 3
    else:
        (long,) = prompts[3:]
        row = [token for prompt in PROMPTS for token in prompt]
        assert long == (row * 12)[:length]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected


def test_rings_are_as_narrow_as_their_chunks_allow(tiny_model: Callable[..., Decoder]) -> None:
    """So that they wrap within a short prompt."""
    model = tiny_model(**WINDOWS)
    for chunk, slots in ((None, WINDOW + 1), (1, WINDOW + 1), (3, WINDOW + 3)):
        cache = module.empty_cache(SlidingCache, model, 30, chunk)
        assert [k.shape[2] for k in cache.k] == [slots, 30]  # type: ignore[attr-defined]


class TestOwnPrompts:
    class Characters:
        """Reads lower-case letters and spaces."""

        def encode(self, text: str) -> list[int]:
            if not set(text) <= set("abcdefghijklmnopqrstuvwxyz "):
                raise ValueError("a character has no id")
            return [ord(character) - 32 for character in text]

    def test_what_it_can_read(self, tiny_config: Callable[..., ModelConfig]) -> None:
        prompts = module.own_prompts(tiny_config(), self.Characters(), 8)
        assert list(prompts) == list(module.PROMPTS[:7])  # the last is Japanese
        assert prompts["The capital of France is"] == self.Characters().encode("he capital of rance is")

    def test_what_fits(self, tiny_config: Callable[..., ModelConfig]) -> None:
        prompts = module.own_prompts(tiny_config(max_position_embeddings=16), self.Characters(), 10)
        assert max(map(len, prompts.values())) == 6

"""Parts of a model: what each process has, and that together they compute what one does, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import amount
from checkpoints import Quant, random_ids, reference_model, save_folder, save_gguf, save_mxfp4, save_nanogpt
from ranks import ThreadGroup, on_ranks
from tiny import make_tiny_config

from infer.backend import Row, backend_for
from infer.cache import KVCache, PagedCache
from infer.config import ModelConfig
from infer.loader.hf_experts import read_stacked
from infer.loader.load import load_model
from infer.models.common import Block, Decoder
from infer.models.registry import MODELS, build_model
from infer.models.rows import ALL
from infer.models.sharding import ModelShard, check_world_size, shard_heads
from infer.nn.sharded import shard_ranges

WEIGHTS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "int4": {"quantize": "int4"}, "int8": {"quantize": "int8"}}


class TestShares:
    @pytest.mark.parametrize(("total", "count"), [(9, 2), (7, 7), (8, 3), (50257, 4), (1, 1)])
    def test_all_is_shared_evenly(self, total: int, count: int) -> None:
        found = shard_ranges(total, count)
        assert [i for each in found for i in each] == list(range(total))
        sizes = [len(each) for each in found]
        assert len(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)  # the first, which leads, has the most

    @pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 2), (4, 1), (32, 8)])
    def test_heads(self, heads: tuple[int, int]) -> None:
        query, key = heads
        config = make_tiny_config(num_attention_heads=query, num_key_value_heads=key, head_dim=8)
        for count in range(1, query + 1):
            found = shard_heads(config, count)
            assert [h for each in found for h in each.query] == list(range(query))
            assert {h for each in found for h in each.key} == set(range(key))
            for each in found:
                assert len(each.query) > 0
                assert len(each.query) % len(each.key) == 0  # as kernels count on
                group = len(each.query) // len(each.key)
                for at, head in enumerate(each.query):
                    assert head // (query // key) == each.key[at // group]

    def test_refused(self) -> None:
        config = make_tiny_config()
        for count, match in [(5, "4 attention heads cannot be split into 5"), (0, "not 0"), (2.0, "an integer")]:
            with pytest.raises(ValueError, match=match):
                check_world_size(config, count)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="3 MLP columns cannot be split into 4"):
            check_world_size(make_tiny_config(model_type="qwen3_moe", moe_intermediate_size=3), 4)


class NoOutputBias(Decoder):
    class block(Block):
        def __init__(self, config: ModelConfig, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.self_attn.o_proj.bias = self.mlp.down_proj.bias = None


def test_a_shard_has_the_biases_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "llama", NoOutputBias)
    config = make_tiny_config(attention_bias=True, mlp_bias=True)
    expected = [name for name, _ in build_model(config).named_parameters()]
    for shard in on_ranks(2, lambda group: ModelShard(config, group).build()):
        assert [name for name, _ in shard.named_parameters()] == expected


def logits(model: Decoder, make: Callable[[Decoder], Any]) -> torch.Tensor:
    """Of a prompt in two chunks, then three single tokens."""
    ids = random_ids(1, 40)
    cache = make(model)
    backend, found = backend_for(model), []
    for chunk in torch.split(ids, [20, 17, 1, 1, 1], 1):
        found.append(backend.run([Row(cache, chunk, ALL)])[0][0])
    return torch.cat(found)


def paged(model: Decoder) -> PagedCache:
    return PagedCache.from_model_config(model.config, 64, dtype=model.dtype, page_size=16)


def contiguous(model: Decoder) -> KVCache:
    return KVCache.from_model_config(model.config, 64, dtype=model.dtype)


def check_same(path: Path, count: int, make: Callable[[Decoder], Any] = paged, **options: Any) -> None:
    with torch.inference_mode():
        whole = logits(load_model(path, device="cpu", **options)[0], make)

    def part(group: ThreadGroup) -> torch.Tensor:
        with torch.inference_mode():
            return logits(load_model(path, device="cpu", group=group, **options)[0], make)

    for found in on_ranks(count, part):
        assert torch.equal(found, whole)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            more = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72} if family == "llama" else {}
            where = tmp_path_factory.mktemp(family)
            made[family] = save_folder(reference_model(family, vocab_size=131, **more), where)
        return made[family]

    return folder


FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "olmo2", "olmoe", "qwen3_moe", "mixtral", "granitemoe", "gpt_oss")
# Each family with each number of processes and each kind of weights, in pairs.
PAIRS = [
    ("llama", 2, "int4"),
    ("llama", 4, "float32"),
    ("llama", 9, "int8"),
    ("qwen3", 2, "bfloat16"),
    ("qwen3", 3, "int4"),
    ("gemma3", 2, "float32"),
    ("gemma3", 4, "bfloat16"),
    ("gpt2", 3, "float32"),
    ("gpt2", 4, "int8"),
    ("olmo2", 2, "float32"),
    ("olmo2", 4, "bfloat16"),
    ("olmoe", 2, "bfloat16"),
    ("olmoe", 3, "float32"),
    ("qwen3_moe", 2, "int4"),
    ("qwen3_moe", 4, "float32"),
    ("mixtral", 2, "bfloat16"),
    ("granitemoe", 3, "int8"),
    ("gpt_oss", 2, "float32"),
    ("gpt_oss", 4, "int4"),
]


class TestSameBits:
    @pytest.mark.parametrize(("family", "count", "weights"), amount(list(product(FAMILIES, (2, 3, 4), WEIGHTS)), PAIRS))
    def test_families(self, folders: Callable[[str], Path], family: str, count: int, weights: str) -> None:
        check_same(folders(family), count, **WEIGHTS[weights])

    @pytest.mark.parametrize("family", ["llama", "olmoe"])
    def test_without_a_table(self, folders: Callable[[str], Path], family: str) -> None:
        """A cache that is asked to attend: a page of another size than kernels take on a GPU, and KVCache."""
        check_same(folders(family), 3, contiguous)

    @pytest.mark.parametrize("family", ["qwen3", "olmoe", "gpt_oss"])
    def test_plain_torch(self, folders: Callable[[str], Path], family: str) -> None:
        """Within rounding: torch's products depend on shapes."""
        path = folders(family)
        whole = load_model(path, device="cpu")[0]
        ids = random_ids(1, 12)
        with torch.no_grad():
            expected = whole(ids)

        def part(group: ThreadGroup) -> torch.Tensor:
            model = load_model(path, device="cpu", group=group)[0]
            with torch.no_grad():
                cache = contiguous(model)
                return model.run([Row(cache, ids, ALL)])[0]

        for found in on_ranks(2, part):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


class TestFormats:
    """Each process reads its rows alone."""

    @pytest.mark.parametrize(("quant", "options"), [(Quant.F32, {}), (Quant.Q8_0, {"quantize": "int8"})])
    def test_gguf(self, tmp_path: Path, quant: Quant, options: dict[str, Any]) -> None:
        path = save_gguf(reference_model("llama", vocab_size=130), tmp_path / "model.gguf", quant)
        check_same(path, 3, **options)

    def test_gguf_that_keeps_blocks(self, tmp_path: Path) -> None:
        path = save_gguf(reference_model("llama"), tmp_path / "model.gguf", Quant.Q4_1)
        check_same(path, 4, quantize="int4")

    def test_gguf_of_experts(self, tmp_path: Path) -> None:
        path = save_gguf(reference_model("gpt_oss", intermediate_size=64), tmp_path / "model.gguf", Quant.Q8_0)
        check_same(path, 3)

    def test_mxfp4(self, tmp_path: Path) -> None:
        """Blocks as published, where gate and up are alternate rows, and shares that do not begin with a tile."""
        save_mxfp4(reference_model("gpt_oss", intermediate_size=64), tmp_path)
        check_same(tmp_path, 3)

    @pytest.mark.parametrize(
        ("family", "most"), [("granitemoe", 1), ("gpt_oss", 2)]
    )  # of two alternate rows, one is used
    def test_other_rows_of_experts_are_not_read(self, family: str, most: int) -> None:
        class File:
            def __init__(self, stored: torch.Tensor) -> None:
                self.stored, self.read = stored, 0

            def get_shape(self) -> list[int]:
                return [*self.stored.shape]

            def __getitem__(self, at: Any) -> torch.Tensor:
                self.read += self.stored[at].numel()
                return self.stored[at]

        stored = torch.arange(3 * 10 * 4).view(3, 4, 10) if family == "gpt_oss" else torch.arange(120).view(3, 10, 4)
        whole = torch.cat([*read_stacked(File(stored), None, "gate_up_proj", family, range(30), 30)])
        for rows in (range(11, 14), range(16, 20), range(8, 23)):
            file = File(stored)
            found = torch.cat([*read_stacked(file, None, "gate_up_proj", family, rows, 30)])
            assert torch.equal(found, whole[rows.start : rows.stop])
            assert file.read <= most * len(rows) * 4

    def test_nanogpt(self, tmp_path: Path) -> None:
        check_same(save_nanogpt(reference_model("gpt2", n_inner=None), tmp_path / "ckpt.pt"), 3)

    @pytest.mark.parametrize("family", ["qwen3", "olmoe", "gpt_oss"])
    def test_a_part_is_small(self, folders: Callable[[str], Path], family: str) -> None:
        """Of all that is split, each process has its share."""
        path = folders(family)
        whole = load_model(path, device="cpu")[0]
        parts = on_ranks(4, lambda group: load_model(path, device="cpu", group=group)[0])
        for name, weight in whole.named_parameters():
            sizes = [dict(part.named_parameters())[name].numel() for part in parts]
            if "norm" in name or "router" in name:
                assert sizes == [weight.numel()] * 4
            elif "qkv_proj" in name:  # of two key/value heads, each is in two processes
                assert max(sizes) < weight.numel() / 2
            else:
                assert sum(sizes) == weight.numel()

    def test_a_part_is_not_called(self, folders: Callable[[str], Path]) -> None:
        def part(group: ThreadGroup) -> None:
            with pytest.raises(TypeError, match="a shard of the model: run it by"):
                load_model(folders("qwen3"), device="cpu", group=group)[0](random_ids(1, 3))

        on_ranks(2, part)

    def test_no_such_token(self, folders: Callable[[str], Path]) -> None:
        def part(group: ThreadGroup) -> None:
            model = load_model(folders("qwen3"), device="cpu", group=group)[0]
            with pytest.raises(IndexError, match="token ids must be from 0 to"), torch.inference_mode():
                backend_for(model).run([Row(paged(model), torch.tensor([[500]]), ALL)])

        on_ranks(2, part)

"""nanoGPT's interface: trained by its own loop, as transformers' GPT-2 computes, cached as without a cache."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import nanogpt_args, nanogpt_weights, reference_model, save_folder, save_nanogpt
from torch import Tensor
from transformers import PreTrainedModel

from infer import load_model
from infer.compat.nanogpt import GPT, GPT2, GPTConfig

BLOCK = 16
SHAPE: dict[str, Any] = {  # nanoGPT's: the exact GELU, a tied head, and an MLP of four times the width
    "max_position_embeddings": BLOCK,
    "tie_word_embeddings": True,
    "n_inner": 256,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu",
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return reference_model("gpt2", **SHAPE)


@pytest.fixture
def model(reference: PreTrainedModel) -> GPT:
    model = GPT(GPTConfig(**nanogpt_args(reference)))
    model.load_state_dict(nanogpt_weights(reference))
    return model.eval()


def some_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(seed))


class TestTraining:
    @pytest.mark.parametrize("bias", [True, False])
    def test_by_nanogpts_own_loop(self, bias: bool, tmp_path: Path) -> None:
        """As in its train.py, less what is for several GPUs; then written as it writes, and loaded."""
        torch.manual_seed(1337)
        batch_size, block_size, gradient_accumulation_steps, grad_clip = 8, BLOCK, 2, 1.0
        learning_rate, min_lr, warmup_iters, max_iters = 1e-2, 1e-3, 5, 60
        data = torch.tensor([0, 1, 2, 3, 4, 2, 5] * 60)  # after 2 comes 3 or 5: the past decides

        def get_batch() -> tuple[Tensor, Tensor]:
            ix = torch.randint(len(data) - block_size, (batch_size,))
            x = torch.stack([data[i : i + block_size] for i in ix])
            y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
            return x, y

        def get_lr(it: int) -> float:
            if it < warmup_iters:
                return learning_rate * (it + 1) / (warmup_iters + 1)
            coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
            return min_lr + coeff * (learning_rate - min_lr)

        model_args: dict[str, Any] = {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "block_size": block_size,
            "bias": bias,
            "vocab_size": 8,
            "dropout": 0.0,
        }
        model = GPT(GPTConfig(**model_args))
        optimizer = model.configure_optimizers(1e-1, learning_rate, (0.9, 0.95), "cpu")
        losses = []
        X, Y = get_batch()
        for iter_num in range(max_iters):
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(iter_num)
            for _ in range(gradient_accumulation_steps):
                _, loss, _ = model(X, Y)
                loss = loss / gradient_accumulation_steps
                X, Y = get_batch()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item() * gradient_accumulation_steps)
        assert losses[0] == pytest.approx(math.log(8), abs=0.2)
        assert losses[-1] < 0.5
        model.eval()
        text = model.generate(torch.tensor([[0, 1, 2]]), 11, temperature=0)
        assert text[0, 3:].tolist() == [3, 4, 2, 5, 0, 1, 2, 3, 4, 2, 5]
        # "attn.bias" is a mask that older checkpoints carry; torch.compile puts _orig_mod. in front.
        stored = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}
        stored["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, block_size, block_size)
        torch.save({"model": stored, "model_args": model_args}, tmp_path / "ckpt.pt")
        again = GPT(GPTConfig(**model_args)).eval()
        again.load_state_dict(torch.load(tmp_path / "ckpt.pt")["model"])
        assert torch.equal(again(text)[0], model(text)[0])
        loaded = load_model(tmp_path / "ckpt.pt", dtype="float32", device="cpu")[0]
        torch.testing.assert_close(loaded(text), model(text, text)[0], atol=1e-5, rtol=1e-5)

    def test_loss_and_gradients(self, reference: PreTrainedModel) -> None:
        """Of transformers' model in float64, where only other formulas show; targets of -1 do not count."""
        theirs = reference_model("gpt2", **SHAPE).double().requires_grad_(True)
        model = GPT(GPTConfig(**nanogpt_args(reference))).double()
        model.load_state_dict(nanogpt_weights(theirs))
        assert model.training
        ids, targets = some_ids(3, 9), some_ids(3, 9, seed=1)
        targets[0, :4] = -1
        logits, loss, kept = model(ids, targets)
        expected = theirs(ids).logits
        expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
        assert kept is None
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(loss, expected_loss, atol=1e-8, rtol=1e-8)
        loss.backward()
        expected_loss.backward()
        gradients = {name: weight.grad for name, weight in model.state_dict(keep_vars=True).items()}
        for name, weight in theirs.named_parameters():
            turned = weight.grad.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else weight.grad
            torch.testing.assert_close(gradients[name], turned, atol=1e-7, rtol=1e-6, msg=name)

    def test_decay(self, model: GPT) -> None:
        """Of matrices and embeddings, each weight once, the tied head's too."""
        decayed, others = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu").param_groups
        assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
        assert {weight.dim() for weight in decayed["params"]} == {2}
        assert {weight.dim() for weight in others["params"]} == {1}
        assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))

    def test_sizes_are_refused_by_nanogpts_names(self, model: GPT) -> None:
        with pytest.raises(ValueError, match="n_embd=33 is not divisible by n_head=2"):
            GPT(GPTConfig(n_embd=33, n_head=2))
        block = model.config.block_size
        with pytest.raises(ValueError, match=f"{block + 1} tokens exceed the block_size of {block}"):
            model(some_ids(1, block + 1))
        with pytest.raises(ValueError, match="max_new_tokens must be 0 or more, not -1"):
            model.generate(some_ids(1, 3), -1)

    def test_dropout(self, reference: PreTrainedModel) -> None:
        """While training alone, and not with a cache, which would drop none of its weights."""
        model = GPT(GPTConfig(**nanogpt_args(reference) | {"dropout": 0.5}))
        ids = some_ids(1, 4)
        first, _, kept = model(ids)
        assert not torch.allclose(first, model(ids)[0])
        for refused in (lambda: model(ids, kv_cache=kept), lambda: model.generate(ids, 1)):
            with pytest.raises(ValueError, match=r"call model\.eval"):
                refused()
        model.eval()
        assert torch.equal(model(ids)[0], model(ids)[0])

    def test_resumed(self, tmp_path: Path) -> None:
        """As by nanoGPT: from the checkpoint of a compiled model, with the optimizer's state, to the same weights."""
        args = nanogpt_args(reference_model("gpt2", **SHAPE))
        settings: dict[str, Any] = {"weight_decay": 0.1, "learning_rate": 1e-2, "betas": (0.9, 0.95)}
        batches = [(some_ids(2, 8, seed), some_ids(2, 8, seed + 50)) for seed in range(6)]

        def train(model: Any, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
            losses = []
            for X, Y in batches:
                _, loss, _ = model(X, Y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.item())
            return losses

        torch.manual_seed(1)
        straight, model = GPT(GPTConfig(**args)), GPT(GPTConfig(**args))
        model.load_state_dict(straight.state_dict())
        expected = train(straight, straight.configure_optimizers(**settings, device_type="cpu"), batches)
        optimizer = model.configure_optimizers(**settings, device_type="cpu")
        compiled: Any = torch.compile(model, backend="eager")
        losses = train(compiled, optimizer, batches[:3])
        compiled.eval()
        with torch.no_grad():
            _, loss, _ = compiled(*batches[3])
        assert loss.item() == pytest.approx(expected[3], rel=1e-5)
        checkpoint = {"model": compiled.state_dict(), "optimizer": optimizer.state_dict(), "model_args": args}
        torch.save(checkpoint | {"iter_num": 3, "best_val_loss": loss, "config": {}}, tmp_path / "ckpt.pt")

        checkpoint = torch.load(tmp_path / "ckpt.pt")
        resumed = GPT(GPTConfig(**checkpoint["model_args"]))
        resumed.load_state_dict({name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()})
        ids = some_ids(1, 4)
        loaded = load_model(tmp_path / "ckpt.pt", dtype="float32", device="cpu")[0]
        torch.testing.assert_close(loaded(ids), resumed(ids, ids)[0], atol=1e-5, rtol=1e-5)
        optimizer = resumed.configure_optimizers(**settings, device_type="cpu")
        optimizer.load_state_dict(checkpoint["optimizer"])
        losses += train(resumed, optimizer, batches[3:])
        assert losses == pytest.approx(expected, rel=1e-5)

    def test_names(self, reference: PreTrainedModel) -> None:
        """nanoGPT's, in its order, by which optimizers number their state."""
        model = GPT(GPTConfig(**nanogpt_args(reference)))
        names = [name for name, _ in model.named_parameters()]
        norm, attn = ["weight", "bias"], ["c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"]
        mlp = ["c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"]
        parts = {"ln_1": norm, "attn": attn, "ln_2": norm, "mlp": mlp}
        layer = [f"{part}.{name}" for part, names_of in parts.items() for name in names_of]
        expected = ["wte.weight", "wpe.weight", *(f"h.{i}.{name}" for i in range(3) for name in layer)]
        expected = [f"transformer.{name}" for name in (*expected, "ln_f.weight", "ln_f.bias")]
        assert names == expected
        assert list(model.state_dict()) == [*expected, "lm_head.weight"]
        assert model.transformer.h[1].attn.c_attn is model.decoder.layers[1].self_attn.qkv_proj

    def test_state_dict_of_a_part(self, model: GPT) -> None:
        """With a prefix, into a given dict, with gradients: as modules around this one ask for it."""
        given: dict[str, Any] = {"before": 1}
        assert model.state_dict(destination=given, prefix="module.", keep_vars=True) is given
        assert list(given) == ["before", *(f"module.{name}" for name in model.state_dict())]
        assert given["module.lm_head.weight"] is model.transformer.wte.weight
        wrapped = torch.nn.Sequential(model)
        assert list(wrapped.state_dict()) == [f"0.{name}" for name in model.state_dict()]
        assert not model.state_dict()["lm_head.weight"].requires_grad

    def test_strict(self, model: GPT) -> None:
        weights = model.state_dict()
        with pytest.raises(RuntimeError, match=r"transformer\.ln_f\.bias"):
            model.load_state_dict({name: x for name, x in weights.items() if name != "transformer.ln_f.bias"})
        with pytest.raises(RuntimeError, match="nonsense"):
            model.load_state_dict(weights | {"nonsense.weight": torch.ones(1)})

    def test_data_parallel(self, model: GPT, tmp_path: Path) -> None:
        """Wrapped by DDP: gradients, and the names in a checkpoint."""
        distributed = torch.distributed
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            wrapped = torch.nn.parallel.DistributedDataParallel(model.train())
            _, loss, _ = wrapped(some_ids(2, 8), some_ids(2, 8, seed=1))
            loss.backward()
            assert all(weight.grad is not None for weight in model.parameters())
            assert list(wrapped.module.state_dict()) == list(model.state_dict())
            assert list(wrapped.state_dict()) == [f"module.{name}" for name in model.state_dict()]
        finally:
            distributed.destroy_process_group()

    def test_modes_and_dtypes_reach_the_model(self, model: GPT) -> None:
        assert not model.decoder.training
        assert model.train().decoder.training
        assert all(block.training for block in model.decoder.layers)
        assert not model.eval().decoder.layers[0].training
        assert model.double().decoder.dtype is torch.float64
        assert model(some_ids(1, 3))[0].dtype is torch.float64
        copy = deepcopy(model)
        assert copy.transformer.wte is copy.decoder.embed_tokens is not model.decoder.embed_tokens

    def test_counts(self) -> None:
        """GPT-2 small has 124M parameters. 40 sequences a second are 124M * 6 * 1024 * 40 operations, and attention."""
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab_size=50257))
        assert model.get_num_params(non_embedding=False) == 124_439_808
        assert model.get_num_params() == 124_439_808 - 1024 * 768
        flops = 40 * 1024 * (6 * model.get_num_params() + 12 * 12 * 768 * 1024)
        assert model.estimate_mfu(20, 0.5) == pytest.approx(flops / 312e12)

    def test_cropped(self, model: GPT, reference: PreTrainedModel) -> None:
        model.generate(some_ids(1, 4), 1)  # the kernels were planned for the longer block
        model.crop_block_size(6)
        assert model.config.block_size == model.transformer.wpe.weight.shape[0] == 6
        ids = some_ids(2, 6)
        torch.testing.assert_close(model(ids)[0], reference(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)
        text = model.generate(some_ids(1, 4), 5, temperature=0)
        assert int(text[0, -1]) == int(reference(text[:, -7:-1]).logits[0, -1].argmax())
        with pytest.raises(ValueError, match="7 tokens exceed the block_size of 6"):
            model(some_ids(1, 7))
        with pytest.raises(ValueError, match="block_size must be from 1 to 6, not 7"):
            model.crop_block_size(7)


class TestForward:
    def test_last_logits_unless_trained(self, model: GPT, reference: PreTrainedModel) -> None:
        ids = some_ids(2, 7)
        logits, loss, kept = model(ids)
        assert (logits.shape, loss, len(kept)) == ((2, 1, 128), None, 3)
        torch.testing.assert_close(logits, reference(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("cuts", [(5,), (1, 2, 3), (4, 8)], ids=str)
    def test_past(self, model: GPT, reference: PreTrainedModel, cuts: tuple[int, ...]) -> None:
        """In passes of any lengths: logits, keys and values as in one."""
        ids, targets = some_ids(2, 9), some_ids(2, 9, seed=1)
        whole, _, expected = model(ids, targets)
        past, pieces = None, []
        for start, stop in zip((0, *cuts), (*cuts, 9), strict=True):
            logits, _, past = model(ids[:, start:stop], targets[:, start:stop], past)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(whole, reference(ids).logits, atol=1e-4, rtol=1e-4)
        assert len(past) == 3
        assert past[0][0].shape == past[0][1].shape == (2, 4, 9, 16)  # [B, n_head, T, n_embd / n_head]
        assert past[0][2] == 9
        torch.testing.assert_close(past, expected, atol=1e-4, rtol=1e-4)
        cached = reference(ids, use_cache=True).past_key_values
        torch.testing.assert_close(past[2][0], cached.layers[2].keys, atol=1e-4, rtol=1e-4)

    def test_buffers_longer_than_what_is_filled(self, model: GPT) -> None:
        """(k_cache, v_cache, cache_pos) with room for the block, and whatever lies behind cache_pos."""
        ids = some_ids(2, 5)
        _, _, past = model(ids[:, :4])
        buffers = [
            (*(torch.cat((x, torch.full((2, 4, BLOCK - 4, 16), 1e9)), 2) for x in (k, v)), t) for k, v, t in past
        ]
        assert torch.equal(model(ids[:, 4:], kv_cache=buffers)[0], model(ids[:, 4:], kv_cache=past)[0])
        pairs = [(k, v) for k, v, _ in past]
        assert torch.equal(model(ids[:, 4:], kv_cache=pairs)[0], model(ids[:, 4:], kv_cache=past)[0])

    def test_a_training_step_keeps_nothing(self, model: GPT) -> None:
        ids = some_ids(1, 4)
        assert model.train()(ids, ids)[2] is None
        assert model(ids)[2] is not None
        assert model.eval()(ids, ids)[2] is not None

    def test_the_past_is_not_written_to(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4))
        before = [(k.clone(), v.clone(), positions) for k, v, positions in past]
        first, second = (model(torch.tensor([[token]]), kv_cache=past)[2] for token in (1, 2))
        assert first[0][2] == second[0][2] == 5
        torch.testing.assert_close(list(past), before, atol=0, rtol=0)

    def test_gradients_through_the_past(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4))
        _, loss, _ = model(some_ids(1, 1), some_ids(1, 1), past)
        loss.backward()
        assert model.transformer.wpe.weight.grad[:5].any(-1).all()

    def test_refused(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4))
        for wrong, message in (
            (past[:2], "must be of each of 3 layers, all of one length"),
            ([past[0], past[1], (*past[2][:2], 2)], "all of one length"),
            ([(k[:, :2], v[:, :2], 4) for k, v, _ in past], "do not fit the cache"),
            ([(k, v, 5) for k, v, _ in past], "cache_pos is 5, but k and v have 4 positions"),
            ([(k,) for k, _, _ in past], r"\(k, v\) or \(k, v, cache_pos\) of each layer"),
        ):
            with pytest.raises(ValueError, match=message):
                model(some_ids(1, 1), kv_cache=wrong)
        with pytest.raises(ValueError, match="17 tokens exceed the block_size of 16"):
            model.train()(some_ids(1, 17), some_ids(1, 17))
        with pytest.raises(ValueError, match="13 more requested, capacity 16"):
            model.eval()(some_ids(1, 13), kv_cache=past)

    def test_autocast(self, model: GPT) -> None:
        """In the dtype of autocast, with gradients and without, in one pass and in two."""
        ids = some_ids(1, 6)
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
                whole, _, past = model(ids)
                _, _, past = model(ids[:, :4])
                logits, _, past = model(ids[:, 4:], kv_cache=past)
            assert past[0][0].dtype is torch.bfloat16
            torch.testing.assert_close(logits, whole, atol=0.1, rtol=0.1)

    def test_autocast_keeps_the_residual_stream_in_float32(self, model: GPT) -> None:
        seen: list[torch.dtype] = []
        for norm in (model.transformer.h[1].ln_1, model.transformer.ln_f):
            norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss, _ = model.train()(some_ids(1, 6), some_ids(1, 6))
        loss.backward()
        assert seen == [torch.float32] * 2
        assert logits.dtype is torch.bfloat16
        assert model.lm_head.weight.grad.dtype is torch.float32


class TestSeedLoops:
    """The loops of the documents that the project grew from, as they stand there."""

    def test_of_the_cache_for_nanogpt(self, model: GPT) -> None:
        def generate(self: GPT, idx: Tensor, max_new_tokens: int, use_cache: bool = False) -> tuple[Tensor, list[int]]:
            block_size, fed = self.config.block_size, []
            kv_cache = None
            for _ in range(max_new_tokens):
                cache_full = kv_cache and kv_cache[0][2] >= block_size
                if use_cache and kv_cache and not cache_full:
                    idx_cond = idx[:, [-1]]
                else:
                    idx_cond = idx[:, -block_size:]
                    if cache_full:
                        kv_cache = None
                fed.append(idx_cond.shape[1])
                logits, _, kv_cache = self(idx_cond, kv_cache=kv_cache if use_cache else None)
                idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
            return idx, fed

        for mode in (True, False):  # no dropout, so training mode changes nothing
            model.train(mode)
            cached, fed = generate(model, some_ids(2, 12), 8, use_cache=True)
            plain, all_fed = generate(model, some_ids(2, 12), 8)
            assert torch.equal(cached, plain)
            assert torch.equal(cached, model.generate(some_ids(2, 12), 8, temperature=0))
            assert fed == [12, 1, 1, 1, 1, 16, 16, 16]
            assert all_fed == [12, 13, 14, 15, 16, 16, 16, 16]

    def test_of_the_lesson(self, model: GPT, reference: PreTrainedModel) -> None:
        lesson = GPT2(model.config).eval()
        lesson.load_state_dict({name.removeprefix("transformer."): x for name, x in model.state_dict().items()})
        assert lesson.wte.weight is lesson.lm_head.weight
        assert lesson.wpe.weight.shape == (BLOCK, 64)
        assert (len(lesson.h), lesson.ln_f) == (3, lesson.transformer.ln_f)
        idx = start = some_ids(2, 3)
        for _ in range(6):
            logits, _ = lesson(idx)
            last_token_logits = logits[:, -1, :]
            idx = torch.cat((idx, last_token_logits.argmax(-1, keepdim=True)), dim=1)
        logits, loss = lesson(idx, idx)
        torch.testing.assert_close(logits, reference(idx).logits, atol=1e-4, rtol=1e-4)
        assert loss is not None

        past_kv, cached = None, start
        for _ in range(6):
            logits, _, past_kv = lesson(cached if past_kv is None else cached[:, -1:], past_kv=past_kv)
            cached = torch.cat((cached, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(cached, idx)
        past_k, past_v = past_kv[0]
        assert past_k.shape == past_v.shape == (2, 4, 8, 16)


class TestGenerate:
    @pytest.mark.parametrize(
        ("length", "new"), [(3, 10), (1, 16), (BLOCK, 4), (BLOCK + 3, 4), (10, 20)], ids=lambda n: str(n)
    )
    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_k": 20}, {}], ids=str)
    def test_cached_as_without(self, model: GPT, length: int, new: int, sampling: dict[str, Any]) -> None:
        """The same tokens, within the block and beyond it, of every row."""
        ids = some_ids(2, length)
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(7)
            texts.append(model.generate(ids, new, use_cache=use_cache, **sampling))
        assert torch.equal(*texts)
        assert texts[0].shape == (2, length + new)
        assert torch.equal(texts[0][:, :length], ids)

    def test_greedy_beyond_the_block(self, model: GPT, reference: PreTrainedModel) -> None:
        """Each token is the top token of transformers after the last block_size tokens."""
        text = model.generate(some_ids(2, 12), 12, temperature=0)
        for at in range(12, 24):
            expected = reference(text[:, max(0, at - BLOCK) : at]).logits[:, -1].argmax(-1)
            assert torch.equal(text[:, at], expected)

    def test_draws(self, model: GPT) -> None:
        """By torch's generator, from the top_k tokens."""
        ids = some_ids(1, 4)
        best = set(model(ids)[0][0, -1].topk(3).indices.tolist())
        torch.manual_seed(0)
        drawn = {int(model.generate(ids, 1, temperature=5.0, top_k=3)[0, -1]) for _ in range(60)}
        assert drawn == best

    def test_what_is_fed(self, model: GPT, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The prompt, single tokens, and beyond the block everything that fits."""
        monkeypatch.setenv("KV_DEBUG", "1")
        monkeypatch.setenv("KV_DEBUG_LAYER", "0")
        model.generate(some_ids(1, BLOCK - 2), 5)
        fed = [line.split("t=")[1].split()[0] for line in capfd.readouterr().err.splitlines() if "[GPT]" in line]
        assert fed == ["14", "1", "1", "16", "16"]

    def test_refused(self, model: GPT) -> None:
        for options in ({"temperature": -1}, {"top_k": -1}):
            with pytest.raises(ValueError, match="must be"):
                model.generate(some_ids(1, 2), 1, **options)
        with pytest.raises(ValueError, match=r"outside the vocabulary 0\.\.127"):
            model.generate(torch.tensor([[1, 128]]), 1)
        assert model.generate(some_ids(1, 2), 0).shape == (1, 2)


class TestFromPretrained:
    def test_a_folder(self, tmp_path: Path) -> None:
        reference = reference_model("gpt2")  # OpenAI's GELU
        model = GPT.from_pretrained(str(save_folder(reference, tmp_path)), {"dropout": 0.1})
        assert model.config == GPTConfig(**nanogpt_args(reference) | {"dropout": 0.1})
        assert all(weight.requires_grad and weight.dtype is torch.float32 for weight in model.parameters())
        ids = some_ids(2, 9)
        torch.testing.assert_close(model.eval()(ids, ids)[0], reference(ids).logits, atol=1e-4, rtol=1e-4)

    def test_a_checkpoint(self, model: GPT, reference: PreTrainedModel, tmp_path: Path) -> None:
        again = GPT.from_pretrained(str(save_nanogpt(reference, tmp_path / "ckpt.pt"))).eval()
        assert torch.equal(again(some_ids(1, 5))[0], model(some_ids(1, 5))[0])

    def test_openais_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, asked = save_folder(reference_model("gpt2"), tmp_path), []

        def fetch(name: str, **options: Any) -> Path:
            asked.append(name)
            return folder

        monkeypatch.setattr("infer.loader.find.fetch", fetch)
        GPT.from_pretrained("gpt2-medium")
        assert set(asked) == {"openai-community/gpt2-medium"}

    def test_refused(self, tmp_path: Path) -> None:
        folder = str(save_folder(reference_model("llama"), tmp_path))
        with pytest.raises(ValueError, match=r"is a model of type llama, not gpt2: use infer\.load_model"):
            GPT.from_pretrained(folder)
        with pytest.raises(ValueError, match="only dropout can be overridden, not n_layer"):
            GPT.from_pretrained(folder, {"n_layer": 2})

"""nanoGPT's interface: trained by its own loop, as transformers' GPT-2 computes, cached as without a cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import nanogpt_args, nanogpt_weights, reference_model, save_folder, save_nanogpt
from torch import Tensor
from transformers import PreTrainedModel

from infer import load_model
from infer.compat.nanogpt import GPT, GPTConfig

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

    def test_dropout(self, reference: PreTrainedModel) -> None:
        """While training alone, and not with a cache, which would drop none of its weights."""
        model = GPT(GPTConfig(**nanogpt_args(reference) | {"dropout": 0.5}))
        ids = some_ids(1, 4)
        assert not torch.allclose(model(ids)[0], model(ids)[0])
        for refused in (lambda: model(ids, use_cache=True), lambda: model.generate(ids, 1)):
            with pytest.raises(ValueError, match=r"call model\.eval"):
                refused()
        model.eval()
        assert torch.equal(model(ids)[0], model(ids)[0])


class TestForward:
    def test_last_logits_unless_trained(self, model: GPT, reference: PreTrainedModel) -> None:
        ids = some_ids(2, 7)
        logits, loss, kept = model(ids)
        assert (logits.shape, loss, kept) == ((2, 1, 128), None, None)
        torch.testing.assert_close(logits, reference(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("cuts", [(5,), (1, 2, 3), (4, 8)], ids=str)
    def test_past(self, model: GPT, reference: PreTrainedModel, cuts: tuple[int, ...]) -> None:
        """In passes of any lengths: logits, keys and values as in one."""
        ids, targets = some_ids(2, 9), some_ids(2, 9, seed=1)
        whole, _, expected = model(ids, targets, use_cache=True)
        past, pieces = None, []
        for start, stop in zip((0, *cuts), (*cuts, 9), strict=True):
            logits, _, past = model(ids[:, start:stop], targets[:, start:stop], past, use_cache=True)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(whole, reference(ids).logits, atol=1e-4, rtol=1e-4)
        assert len(past) == 3
        assert past[0][0].shape == past[0][1].shape == (2, 4, 9, 16)  # [B, n_head, T, n_embd / n_head]
        torch.testing.assert_close(past, expected, atol=1e-4, rtol=1e-4)
        cached = reference(ids, use_cache=True).past_key_values
        torch.testing.assert_close(past[2][0], cached.layers[2].keys, atol=1e-4, rtol=1e-4)

    def test_the_past_is_not_written_to(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4), use_cache=True)
        before = [(k.clone(), v.clone()) for k, v in past]
        first, second = (model(torch.tensor([[token]]), past_kv=past)[2] for token in (1, 2))
        assert first[0][0].shape[2] == second[0][0].shape[2] == 5
        torch.testing.assert_close(list(past), before, atol=0, rtol=0)

    def test_gradients_through_the_past(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4), use_cache=True)
        _, loss, _ = model(some_ids(1, 1), some_ids(1, 1), past)
        loss.backward()
        assert model.decoder.embed_positions.weight.grad[:5].any(-1).all()

    def test_refused(self, model: GPT) -> None:
        _, _, past = model(some_ids(1, 4), use_cache=True)
        for wrong, message in (
            (past[:2], r"must be \(k, v\) of each of 3 layers, all of one length"),
            ([past[0], past[1], tuple(x[:, :, :2] for x in past[2])], "all of one length"),
            ([tuple(x[:, :2] for x in pair) for pair in past], "do not fit the cache"),
        ):
            with pytest.raises(ValueError, match=message):
                model(some_ids(1, 1), past_kv=wrong)
        with pytest.raises(ValueError, match="17 positions exceed the 16"):
            model(some_ids(1, 17))
        with pytest.raises(ValueError, match="13 more requested, capacity 16"):
            model(some_ids(1, 13), past_kv=past)


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

"""examples/train_gpt.py learns a small text, and what it writes is a checkpoint like any other."""

from __future__ import annotations

import importlib.util
import math
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import single_threaded

from infer import SamplingParams, Tokenizer, generate, load_model
from infer.cli import main as infer

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TEXT = "The cat sat on the mat.\nThe dög sat on the log. 😀\n\n" * 12
BLOCK = 16
TINY = ["--steps", "60", "--batch-size", "8", "--block-size", str(BLOCK), "--layers", "2", "--heads", "2"]
TINY += ["--width", "32", "--lr", "1e-2"]

one_thread = pytest.fixture(scope="module", autouse=True)(single_threaded)


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cats.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[[], ["--rope"], ["--dropout", "0.1"]], ids=["learned", "rope", "dropout"])
def trained(
    request: pytest.FixtureRequest, example: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """The folder that it wrote to, and the losses of its steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "cats.txt").write_text(TEXT, encoding="utf-8")
    losses: list[float] = []
    train = example.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "train", lambda *args: losses.extend(found := train(*args)) or found)
        example.main(["--text", str(folder / "cats.txt"), "--out", str(folder / "a" / "out"), *TINY, *request.param])
    return folder / "a" / "out", losses


def test_the_loss_falls(trained: tuple[Path, list[float]]) -> None:
    _, losses = trained
    assert len(losses) == 60
    assert losses[0] == pytest.approx(math.log(len(set(TEXT))), abs=0.3)  # as good as guessing
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def test_the_files(trained: tuple[Path, list[float]]) -> None:
    """nanoGPT's own, with nothing in them that it would not have written."""
    out, _ = trained
    assert sorted(file.name for file in out.iterdir()) == ["ckpt.pt", "meta.pkl"]
    contents = torch.load(out / "ckpt.pt", weights_only=True)
    assert {"model", "model_args", "iter_num", "best_val_loss", "config"} <= contents.keys()
    names = set(contents["model"])
    learned = {"transformer.wpe.weight"} if "model_type" not in contents["model_args"] else set()
    assert learned | {"transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"} <= names
    assert "transformer.h.1.attn.c_attn.weight" in names
    assert contents["model"]["transformer.h.0.mlp.c_fc.weight"].shape == (128, 32)
    meta = pickle.loads((out / "meta.pkl").read_bytes())
    assert meta["vocab_size"] == len(meta["stoi"]) == len(meta["itos"]) == len(set(TEXT))
    assert all(meta["itos"][i] == character for character, i in meta["stoi"].items())


@torch.inference_mode()
def test_it_has_learned_the_text(trained: tuple[Path, list[float]]) -> None:
    """Read back, it knows most characters from those before."""
    out, _ = trained
    model, _ = load_model(out, dtype="float32", device="cpu")
    ids = torch.tensor(Tokenizer(out).encode(TEXT[: 4 * BLOCK + 1]))
    guessed = model(ids[:-1].view(4, BLOCK)).argmax(-1).flatten()
    assert (guessed == ids[1:]).float().mean() > 0.6


@pytest.mark.parametrize("prompt", ["T", TEXT[: BLOCK - 1], TEXT[:BLOCK], TEXT[: 2 * BLOCK + 3]], ids=len)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_is_uncached_across_the_block_size(
    trained: tuple[Path, list[float]], prompt: str, temperature: float
) -> None:
    out, _ = trained
    model, _ = load_model(out, dtype="float32", device="cpu")
    tokenizer = Tokenizer(out)
    ids, params = tokenizer.encode(prompt), SamplingParams(temperature=temperature, seed=3, max_new_tokens=2 * BLOCK)
    cached = generate(model, tokenizer, ids, params, on_full="recompute")
    uncached = generate(model, tokenizer, ids, params, on_full="recompute", use_kv_cache=False)
    assert cached.token_ids == uncached.token_ids
    assert cached.text == uncached.text
    assert len(cached.token_ids) == 2 * BLOCK
    with pytest.raises(ValueError, match=f"exceed the model's context of {BLOCK}"):
        generate(model, tokenizer, ids, params)


@pytest.mark.parametrize("whole", [True, False], ids=["folder", "file"])
def test_the_command_line_runs_it(
    trained: tuple[Path, list[float]], capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    out, _ = trained
    settings = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8"]
    with pytest.raises(SystemExit) as exit_info:
        infer(["generate", "--model", str(out if whole else out / "ckpt.pt"), *settings, "The c"])
    shown = capsys.readouterr()
    assert not exit_info.value.code, shown.err
    model, _ = load_model(out, dtype="float32", device="cpu")
    tokenizer = Tokenizer(out)
    result = generate(model, tokenizer, tokenizer.encode("The c"), SamplingParams(max_new_tokens=8))
    assert result.text in shown.out


@pytest.mark.parametrize("page", [EXAMPLE, EXAMPLE.parents[1] / "docs" / "python.md"], ids=lambda page: page.name)
def test_the_command_that_is_shown(
    trained: tuple[Path, list[float]], capsys: pytest.CaptureFixture[str], page: Path
) -> None:
    """It works as it stands, with another text's words: the context is shorter than what is generated by default."""
    (shown,) = re.findall(r"infer generate (--model out/ckpt\.pt .*)", page.read_text(encoding="utf-8"))
    words = {"out/ckpt.pt": str(trained[0] / "ckpt.pt"), "Once": "The c"}
    with pytest.raises(SystemExit) as exit_info:
        infer(["generate", *(words.get(word, word) for word in shlex.split(shown))])
    assert not exit_info.value.code, capsys.readouterr().err


def test_what_it_prints(example: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--text", str(text), "--out", str(tmp_path / "out"), *TINY, "--steps", "2"])
    shown = capsys.readouterr().out
    assert f"{len(TEXT):,} characters, {len(set(TEXT))} different" in shown
    assert re.search(r"^  loss\n.*2 steps$", shown, re.MULTILINE | re.DOTALL)
    assert re.search(rf"validation loss \d\.\d+, where guessing would give {math.log(len(set(TEXT))):.3f}", shown)
    assert "\nThe cat " in shown  # the sample goes on from how the text begins
    assert shown.rstrip().endswith(f"written to {tmp_path / 'out' / 'ckpt.pt'}")


def test_the_same_seed_gives_the_same_weights(example: Any, text: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        example.main(["--text", str(text), "--out", str(tmp_path / name), *TINY, "--steps", "3", "--dropout", "0.2"])
    a, b = (torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"] for name in ("a", "b"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_context_shorter_than_the_sample_prompt(example: Any, text: Path, tmp_path: Path) -> None:
    example.main(["--text", str(text), "--out", str(tmp_path), *TINY, "--steps", "1", "--block-size", "3"])
    assert load_model(tmp_path, device="cpu")[1].max_position_embeddings == 3


@pytest.mark.parametrize("block_size", [1, 2, 16, 64, 100])
def test_as_much_text_as_it_asks_for(example: Any, tmp_path: Path, block_size: int) -> None:
    """The number in the refusal is enough."""
    path = tmp_path / "text.txt"
    settings = ["--text", str(path), "--out", str(tmp_path / "out"), *TINY, "--block-size", str(block_size)]
    path.write_text("a" * (block_size + 1))
    with pytest.raises(SystemExit) as refusal:
        example.main(settings)
    needed = int(re.search(rf"has {block_size + 1} characters and needs at least (\d+):", str(refusal.value))[1])
    path.write_text(("ab" * needed)[:needed])
    example.main([*settings, "--steps", "1"])


@pytest.mark.parametrize(
    ("contents", "settings", "message"),
    [
        (None, [], "cannot read .*No such file"),
        ("folder", [], "cannot read .*Is a directory"),
        (b"\xff\xfe\x00", [], "cannot read .*utf-8"),
        (b"", [], "has 0 characters and needs at least 161: find more text"),
        (TEXT.encode(), ["--width", "33"], "cannot train that: hidden_size 33 is not divisible by 2 heads"),
        (TEXT.encode(), ["--width", "6", "--rope"], "cannot train that: head_dim must be even for RoPE, not 3"),
        (TEXT.encode(), ["--dropout", "1.5"], "cannot train that: dropout must be from 0 to below 1"),
        (TEXT.encode(), ["--lr", "1e30"], "the loss is (nan|inf) after [0-9]+ steps: lower --lr"),
    ],
    ids=["missing", "folder", "not UTF-8", "empty", "width", "odd heads", "dropout", "diverged"],
)
def test_refusals(
    example: Any, tmp_path: Path, contents: bytes | str | None, settings: list[str], message: str
) -> None:
    """One line, and nothing is written."""
    path, out = tmp_path / "text.txt", tmp_path / "out"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents:
        path.mkdir()
    with pytest.raises(SystemExit) as refusal:
        example.main(["--text", str(path), "--out", str(out), *TINY, *settings])
    assert re.search(message, str(refusal.value))
    assert "\n" not in str(refusal.value)
    assert not list(out.glob("*"))


@pytest.mark.parametrize("settings", [["--steps", "0"], ["--layers", "-1"], ["--block-size", "x"]], ids=str)
def test_refused_numbers(example: Any, text: Path, capsys: pytest.CaptureFixture[str], settings: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        example.main(["--text", str(text), *settings])
    assert refusal.value.code == 2
    assert settings[0] in capsys.readouterr().err


def test_a_file_where_the_folder_should_be(example: Any, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(SystemExit, match=r"cannot train that: .*File exists"):
        example.main(["--text", str(text), "--out", str(tmp_path / "out"), *TINY])


def test_as_a_script(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--text", str(text), "--out", str(tmp_path / "out"), *TINY, "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "ckpt.pt").exists()

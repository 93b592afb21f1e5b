"""`infer score` and `infer compare`, against plain torch; and how models are named, and help is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import reference_model, save_folder
from commands import Run, assert_refused
from torch.nn.functional import kl_div, log_softmax

from infer import Tokenizer, load_model
from infer.cli import main

TEXT = "once upon a time there was a cat that sat on a mat"


def logits(folder: Path, ids: list[int], **options: str) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder, device="cpu", **options)[0](torch.tensor([ids]))[0].float()  # type: ignore[arg-type,no-any-return]


class TestScore:
    def test_against_torch(self, run: Run, folder: Path) -> None:
        found = json.loads(run("score", TEXT, "--json").out)
        ids = Tokenizer(folder).encode(TEXT)
        expected = log_softmax(logits(folder, ids), -1)[torch.arange(len(ids) - 1), ids[1:]]
        assert [token["id"] for token in found["tokens"]] == ids
        assert found["tokens"][0]["logprob"] is None
        given = torch.tensor([token["logprob"] for token in found["tokens"][1:]])
        torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)
        assert found["total"] == pytest.approx(float(expected.sum()), abs=1e-3)
        assert found["perplexity"] == pytest.approx(math.exp(-found["total"] / (len(ids) - 1)))

    def test_lines(self, run: Run) -> None:
        first, start, *tokens, total, perplexity = run("score", stdin="hello\n").out.splitlines()
        assert run("score", "-", stdin="hello\n").out.splitlines()[-1] == perplexity
        assert first.split() == ["token", "log-probability", "probability"]
        assert len(start.split()) == 1  # nothing predicts it
        assert "".join(json.loads(line.split()[0]) for line in tokens) == "hello"  # no newline behind it
        assert total.startswith("total ")
        assert perplexity.endswith(f"over {len(tokens)} tokens")

    def test_refused(self, run: Run) -> None:
        assert_refused(run("score", ""), "the text is too short")
        assert_refused(run("score", "hello " * 100), "`infer perplexity` scores longer texts in windows")


class TestCompare:
    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "text"
        path.write_text(TEXT)
        return path

    def test_precisions(self, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ending:
            main(["compare", str(folder), "--text", str(text), "--quantize-b", "int8", "--json"])
        assert not ending.value.code
        found = json.loads(capsys.readouterr().out)
        ids = Tokenizer(folder).encode(TEXT)
        first, second = (log_softmax(logits(folder, ids, **given), -1)[:-1] for given in ({}, {"quantize": "int8"}))
        assert found["tokens"] == len(ids) - 1
        expected = kl_div(second, first, log_target=True, reduction="none").sum(-1)
        assert 0 < found["kl_divergence"] == pytest.approx(float(expected.mean()), rel=0.05)
        assert found["largest_kl_divergence"] == pytest.approx(float(expected.max()), rel=0.05)
        assert found["same_top_token"] == pytest.approx(
            float((first.argmax(-1) == second.argmax(-1)).float().mean()), abs=0.03
        )

    def test_the_same_twice(self, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["compare", str(folder), str(folder), "--text", str(text), "--context", "20"])
        out, err = capsys.readouterr()
        assert "0.000000 nats per token" in out
        assert "100.00%" in out
        assert "both are the same model" in err

    def test_another_vocabulary(
        self, folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = save_folder(reference_model("gpt2", vocab_size=300), tmp_path / "other")
        with pytest.raises(SystemExit) as ending:
            main(["compare", str(folder), str(other), "--text", str(text)])
        assert ending.value.code == 2
        assert "only models of one vocabulary can be compared" in capsys.readouterr().err


class TestNames:
    def test_either_way(self, run: Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = []
        for named in ([str(folder)], ["-m", str(folder)], ["--model", str(folder)]):
            with pytest.raises(SystemExit):
                main(["info", *named, "--json"])
            found.append(json.loads(capsys.readouterr().out)["path"])
        assert found == [str(folder)] * 3

    def test_both_ways(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ending:
            main(["bench", str(folder), "-m", "another"])
        assert ending.value.code == 2
        assert "two models were given" in capsys.readouterr().err

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        import infer

        with pytest.raises(SystemExit) as ending:
            main(["--version"])
        assert not ending.value.code
        assert capsys.readouterr().out == f"infer {infer.__version__}\n"
        assert "LLM" in dir(infer)

    @pytest.mark.parametrize("command", ["generate", "chat", "verify", "bench", "serve"])
    def test_help_has_groups(
        self, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit):
            main([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert "Model:" in lines
        assert not any("…" in line for line in lines)

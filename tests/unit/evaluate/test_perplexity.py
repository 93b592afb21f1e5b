"""Perplexity: transformers' figures on the same windows, each token once, through the cache; and the command."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import once
from checkpoints import load, random_ids, reference_model, save_folder, save_nanogpt, single_threaded
from commands import CONTEXT, Done, assert_refused
from mocks import UniformMockModel
from torch import Tensor
from transformers import PreTrainedModel

from infer import KVCache, Tokenizer, load_model, perplexity, progress
from infer.backend import Row
from infer.backend.cpu.backend import CpuBackend
from infer.cli import main
from infer.evaluate import perplexity as module
from infer.evaluate.perplexity import CHUNK, Plan, plan
from infer.models.common import Decoder

MakeModel = Callable[..., Decoder]
LENGTH = 60
BOS = 1
TEXT = "hello, who goes there? one of the few that can tell: a tiny model of no great worth.\n" * 4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from single_threaded()


def by_transformers(
    reference: PreTrainedModel, ids: Sequence[int], context: int, stride: int, prefix: Sequence[int] = ()
) -> tuple[float, int]:
    """The recipe of its documentation: mean loss with all but the labels of a window's further tokens masked."""
    nats, tokens, scored = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + context - len(prefix), len(ids))
        window = torch.tensor([[*prefix, *ids[start:end]]])
        labels = window.clone()
        labels[:, : len(prefix) + scored - start] = -100
        count = int((labels[:, 1:] != -100).sum())
        nats += reference(window, labels=labels).loss.item() * count
        tokens, scored = tokens + count, end
        if end == len(ids):
            break
    return nats / tokens, tokens


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return random_ids(1, LENGTH)[0].tolist()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "gpt2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    reference = reference_model(request.param)
    return reference, load(save_folder(reference, tmp_path_factory.mktemp(request.param)))


class TestParity:
    @once(
        {
            "context, stride, chunk": [
                (128, 64, CHUNK),
                (128, 64, 7),
                (LENGTH, 30, CHUNK),
                (20, 10, 10),
                (16, 5, 3),
                (16, 14, 1),
                (7, 1, 5),
            ]
        },
        prefix=[[], [BOS], [BOS, 7]],
    )
    def test_transformers(
        self,
        pair: tuple[PreTrainedModel, Decoder],
        ids: list[int],
        monkeypatch: pytest.MonkeyPatch,
        context: int,
        stride: int,
        chunk: int,
        prefix: list[int],
    ) -> None:
        reference, model = pair
        expected, tokens = by_transformers(reference, ids, context, stride, prefix)
        monkeypatch.setattr(module, "CHUNK", chunk)
        found = perplexity(model, ids, context=context, stride=stride, prefix=prefix)
        assert found.tokens == tokens == LENGTH - (not prefix)
        assert found.nats_per_token == pytest.approx(expected, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
        assert found.bits == pytest.approx(expected * tokens / math.log(2), rel=1e-5)
        assert (found.context, found.stride) == (context, stride)

    def test_settings_matter(self, pair: tuple[PreTrainedModel, Decoder], ids: list[int]) -> None:
        """What the figures are compared with above does not stay the same whatever is asked for."""
        settings: list[tuple[int, int, list[int]]] = [(128, 64, []), (16, 5, []), (16, 14, []), (16, 5, [BOS])]
        assert len({round(by_transformers(pair[0], ids, *setting)[0], 3) for setting in settings}) == len(settings)


def layouts() -> Iterator[Plan]:
    for length in range(1, 14):
        for prefix in (0, 1, 3):
            least = max(1, prefix)
            for context in range(least + 1, 10):
                yield from (
                    Plan(length, prefix, context, stride)
                    for stride in range(1, context - least + 1)
                    if length + prefix > 1
                )


class TestWindows:
    def test_each_token_is_scored_once(self) -> None:
        for layout in layouts():
            scored = [i for _, end, first in layout.windows() for i in range(first, end)]
            assert scored == list(range(0 if layout.prefix else 1, layout.length)), layout
            assert layout.tokens == len(scored)

    def test_in_the_first_window_that_holds_it(self) -> None:
        for layout in layouts():
            windows = list(layout.windows())
            for number, (start, end, first) in enumerate(windows):
                assert start == number * layout.stride
                assert layout.prefix + end - start <= layout.context
                assert layout.prefix + first - start >= 1, "nothing would be in front of it"
                assert first < end, "a window for nothing"
                assert not any(first < windows[before][1] for before in range(number))

    @pytest.mark.parametrize(
        ("most", "prefix", "options", "expected"),
        [
            (256, 0, {}, (256, 128)),
            (5000, 0, {}, (1024, 512)),
            (5000, 1, {"context": 3000}, (3000, 1500)),
            (5000, 0, {"stride": 1023}, (1024, 1023)),
            (256, 1, {"context": 2}, (2, 1)),
            (256, 0, {"context": 2}, (2, 1)),
            (256, 4, {"context": 5}, (5, 1)),
        ],
    )
    def test_defaults(
        self,
        tiny_config: Callable[..., Any],
        most: int,
        prefix: int,
        options: dict[str, int],
        expected: tuple[int, int],
    ) -> None:
        layout = plan(tiny_config(max_position_embeddings=most), [1, 2, 3], prefix=[5] * prefix, **options)
        assert (layout.context, layout.stride) == expected


# Token ids, options, and what the message must say, for a model of 64 tokens and a context of 256.
REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "no tokens": ([], {}, r"the text is too short: 0 token\(s\)"),
    "no tokens but a prefix": ([], {"prefix": [1]}, r"too short: 0 token\(s\)"),
    "no tokens but a long prefix": ([], {"prefix": [1, 2]}, r"too short: 0 token\(s\)"),
    "one token": ([1], {}, r"too short: 1 token\(s\), and the first token is not scored"),
    "outside the vocabulary": ([1, 64], {}, r"token id 64 in the text is outside the vocabulary 0\.\.63"),
    "below the vocabulary": ([1, -1], {}, "token id -1 in the text"),
    "a prefix outside": ([1, 2], {"prefix": [99]}, "token id 99 in the text"),
    "no context": ([1, 2], {"context": 0}, "context must be from 2 to the model's 256, not 0"),
    "too little context": ([1, 2], {"context": 1}, "context must be from 2 to the model's 256, not 1"),
    "too little after the prefix": ([1, 2], {"context": 3, "prefix": [1, 2, 3]}, "context must be from 4 to"),
    "too much context": ([1, 2], {"context": 257}, "context must be from 2 to the model's 256, not 257"),
    "part of a token": ([1, 2], {"context": 2.5}, "context must be from 2 to the model's 256, not 2.5"),
    "no stride": ([1, 2], {"stride": 0}, "stride must be from 1 to the window's 255, not 0"),
    "negative stride": ([1, 2], {"stride": -1}, "stride must be from 1 to the window's 255, not -1"),
    "a stride that leaves tokens out": ([1, 2], {"context": 8, "stride": 8}, "stride must be from 1 to the window's 7"),
    "the same after a prefix": (
        [1, 2],
        {"context": 8, "stride": 8, "prefix": [1]},
        "stride must be from 1 to the window's 7, not 8",
    ),
    "unknown dtype of the cache": ([1, 2], {"cache_dtype": "int3"}, "int3"),
}


class TestPerplexity:
    @pytest.mark.parametrize("vocabulary", [10, 1000])
    @pytest.mark.parametrize("options", [{}, {"context": 5, "stride": 2}, {"prefix": [3]}], ids=str)
    def test_as_unsure_as_between_so_many(self, vocabulary: int, options: dict[str, Any]) -> None:
        model = UniformMockModel(vocab_size=vocabulary)
        found = perplexity(model, [1, 2, 3] * 5, **options)
        assert found.perplexity == pytest.approx(vocabulary)
        assert found.nats_per_token == pytest.approx(math.log(vocabulary))

    def test_sure(self) -> None:
        class Sure(UniformMockModel):
            """Knows that each token is one more than that before it."""

            def __call__(self, input_ids: Tensor, kv_cache: Any = None, *, all_logits: bool = False) -> Tensor:
                return 100.0 * torch.nn.functional.one_hot(input_ids + 1, self.config.vocab_size)

        model = Sure(vocab_size=40)
        assert perplexity(model, range(5, 30), context=8).perplexity == pytest.approx(1)
        assert perplexity(model, [*range(5, 15), *range(20, 30)], context=8).nats_per_token == pytest.approx(100 / 19)

    def test_beyond_what_floats_hold(self) -> None:
        class Wrong(UniformMockModel):
            def __call__(self, input_ids: Tensor, kv_cache: Any = None, *, all_logits: bool = False) -> Tensor:
                return -1000.0 * torch.nn.functional.one_hot(input_ids, self.config.vocab_size)

        found = perplexity(Wrong(), [3] * 5)
        assert (found.perplexity, found.nats_per_token) == (math.inf, pytest.approx(1000, rel=1e-2))

    def test_sums_in_float32_at_least(self) -> None:
        """However few bits the logits have."""

        class Rounded(UniformMockModel):
            def __call__(self, *args: Any, **options: Any) -> Tensor:
                return super().__call__(*args, **options).bfloat16()

        found = perplexity(Rounded(vocab_size=1000), [1, 2, 3] * 15)
        assert found.nats_per_token == pytest.approx(math.log(1000), rel=1e-6)

    def test_any_sequence(self, tiny_model: MakeModel) -> None:
        tokens = random_ids(1, 20)[0] % 64
        assert perplexity(tiny_model(), tokens) == perplexity(tiny_model(), tokens.tolist())
        with pytest.raises(TypeError, match="must be token ids, as in"):
            perplexity(tiny_model(), "text")

    def test_one_cache_for_all_windows(self, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """As large as the longest window, and empty for each."""
        made = []
        make_cache = module.make_cache

        def note(model: Any, max_seq_len: int, *args: Any, **options: Any) -> Any:
            made.append((max_seq_len, options["cache_dtype"]))
            return make_cache(model, max_seq_len, *args, **options)

        monkeypatch.setattr(module, "make_cache", note)
        model = tiny_model()
        perplexity(model, [1, 2, 3] * 10, context=8)
        perplexity(model, [1, 2, 3], context=8, prefix=[4])
        assert made == [(8, "auto"), (4, "auto")]

    def test_what_is_fed(self, tiny_model: MakeModel, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """All of a window but its last token: what is scored already in one chunk or more, then the rest."""
        monkeypatch.setattr(module, "CHUNK", 4)
        perplexity(tiny_model(), [1] * 20, context=12, stride=4, prefix=[2])
        assert passes == [4, 4, 3, *[4, 3, 4] * 2, 4, 3, 1]

    def test_logits_are_few(self, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """Never of more tokens than a chunk has: those of a full window would take a gigabyte with Gemma."""
        most, run = 0, CpuBackend.run

        def note(backend: CpuBackend, rows: Sequence[Row]) -> list[Tensor]:
            nonlocal most
            logits = run(backend, rows)
            most = max(most, *(each.shape[1] for each in logits))
            return logits

        monkeypatch.setattr(CpuBackend, "run", note)
        perplexity(tiny_model(max_position_embeddings=1024), [1] * 700)
        assert most == CHUNK

    def test_progress(self, tiny_model: MakeModel) -> None:
        heard: list[tuple[int, float]] = []
        tokens = random_ids(1, 20)[0] % 64
        found = perplexity(tiny_model(), tokens, context=8, stride=6, progress=lambda *news: heard.append(news))
        assert [scored for scored, _ in heard] == [7, 13, 19]
        assert found.windows == 3
        assert heard[0][1] == perplexity(tiny_model(), tokens[:8], context=8).perplexity
        assert heard[-1][1] == found.perplexity

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_int8_cache(self, tiny_model: MakeModel, family: str) -> None:
        """Another figure, so that it is in use, and one close by."""
        model, tokens = tiny_model(model_type=family), random_ids(1, 200)[0] % 64
        exact = perplexity(model, tokens, context=64).nats_per_token
        rounded = perplexity(model, tokens, context=64, cache_dtype="int8").nats_per_token
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=1e-2)

    @pytest.mark.parametrize(("tokens", "options", "message"), REFUSED.values(), ids=REFUSED)
    def test_refused(self, tiny_model: MakeModel, tokens: list[int], options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            perplexity(tiny_model(), tokens, **options)

    def test_training_mode_is_refused(self, tiny_model: MakeModel) -> None:
        with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
            perplexity(tiny_model(model_type="gpt2", dropout=0.1).train(), [1, 2, 3])


Measure = Callable[..., Done]


@pytest.mark.usefixtures("plain_machine")
class TestCommand:
    @pytest.fixture
    def measure(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Measure:
        """Run the command on the tiny model (or on `model`), with a file of this text or bytes."""

        def run(*args: str | Path, text: str | bytes = TEXT, model: Path = folder) -> Done:
            file = tmp_path / "text.txt"
            file.write_bytes(text.encode() if isinstance(text, str) else text)
            with pytest.raises(SystemExit) as exit_info:
                main(["perplexity", str(model), "--text", str(file), *map(str, args)])
            return Done(exit_info.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

        return run

    def test_json(self, measure: Measure, folder: Path, tmp_path: Path) -> None:
        """BOS stands in front of each window, and is not scored."""
        tokenizer = Tokenizer(folder)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        expected = perplexity(load_model(folder)[0], ids, context=32, stride=20, prefix=[BOS])
        done = measure("--json", "--context", "32", "--stride", "20")
        output = json.loads(done.out)
        assert output.pop("time_s") > 0
        assert output == {
            "model": str(folder),
            "text": str(tmp_path / "text.txt"),
            "quantize": None,
            "cache_dtype": "auto",
            "perplexity": expected.perplexity,
            "nats_per_token": expected.nats_per_token,
            "tokens": len(ids),
            "windows": 1 + math.ceil((len(ids) - 31) / 20),
            "context": 32,
            "stride": 20,
            "bits_per_byte": pytest.approx(expected.bits / len(TEXT)),
            "bytes": len(TEXT),
        }
        assert (done.status, done.out.count("\n")) == (0, 1)
        assert done.err == f"{len(ids)} tokens to score, in windows of 32 that advance by 20\n"

    def test_bos_matters(self, measure: Measure, plain: Path) -> None:
        with_bos, without = json.loads(measure("--json").out), json.loads(measure("--json", model=plain).out)
        assert without["tokens"] == with_bos["tokens"] - 1
        assert without["perplexity"] != with_bos["perplexity"]

    def test_text(self, measure: Measure) -> None:
        output = json.loads(measure("--json").out)
        done = measure()
        lines = {line[:22].strip(): line[23:] for line in done.out.splitlines()}
        assert lines.pop("time").endswith(" tok/s")
        assert lines == {
            "perplexity": f"{output['perplexity']:.4f}",
            "nats per token": f"{output['nats_per_token']:.4f}",
            "bits per byte": f"{output['bits_per_byte']:.4f}",
            "tokens scored": f"{output['tokens']:,} in {output['windows']} windows of {CONTEXT}",
        }
        assert done.status == 0

    def test_bytes_of_the_text(self, measure: Measure) -> None:
        """Not its characters, and line ends as they are."""
        assert json.loads(measure("--json", text="größer\r\n" * 3).out)["bytes"] == 3 * 10

    def test_progress(self, measure: Measure) -> None:
        heard: list[progress.Progress] = []
        with progress.listen(heard.append):
            done = measure("--context", "100")
        scored = [each for each in heard if each.what == progress.SCORING]
        assert len(scored) > 3
        assert [each.done for each in scored] == sorted({each.done for each in scored})
        assert scored[-1].done == scored[-1].total
        assert f"perplexity             {scored[-1].note.split()[1]}" in done.out

    def test_int8_cache(self, measure: Measure) -> None:
        plain, rounded = (json.loads(measure("--json", "--cache-dtype", dtype).out) for dtype in ("auto", "int8"))
        assert rounded["cache_dtype"] == "int8"
        assert rounded["perplexity"] != plain["perplexity"]
        assert rounded["perplexity"] == pytest.approx(plain["perplexity"], rel=0.05)

    def test_characters(self, measure: Measure, tmp_path: Path) -> None:
        """nanoGPT's: no BOS, and an error where the text has characters that it has not."""
        characters = sorted(set(TEXT))
        own = {"activation_function": "gelu", "n_inner": None, "tie_word_embeddings": True}
        reference = reference_model("gpt2", vocab_size=len(characters), **own)
        model = save_nanogpt(reference, tmp_path / "out" / "ckpt.pt")
        stoi = {character: i for i, character in enumerate(characters)}
        (model.parent / "meta.pkl").write_bytes(pickle.dumps({"stoi": stoi}))
        output = json.loads(measure("--json", "--context", "50", model=model).out)
        expected, tokens = by_transformers(reference, [stoi[character] for character in TEXT], 50, 25)
        assert output["tokens"] == tokens == len(TEXT) - 1
        assert output["nats_per_token"] == pytest.approx(expected, rel=1e-5)
        assert_refused(measure(text="ein Märchen", model=model), "the vocabulary lacks characters of the text:")

    @pytest.mark.usefixtures("untouched")
    @pytest.mark.parametrize(
        ("text", "args", "message"),
        [
            (b"fine\xff\xfe", [], "text.txt is not UTF-8 text: "),
            ("", [], "the text is too short: 0 token(s)"),
            (TEXT, ["--context", "1"], "context must be from 2 to the model's 256, not 1"),
            (TEXT, ["--context", "257"], "context must be from 1 to the model's 256, not 257"),
            (TEXT, ["--stride", "0"], "stride must be from 1 to the window's 255, not 0"),
            (TEXT, ["--context", "9", "--stride", "9"], "stride must be from 1 to the window's 8, not 9"),
            (TEXT, ["--cache-dtype", "int3"], "--cache-dtype must be auto or int8, not 'int3'"),
            (TEXT, ["--dtype", "int3"], "unknown dtype 'int3'"),
            (TEXT, ["--threads", "0"], "threads must be an integer from 1 to"),
            (TEXT, ["--text", "missing.txt"], "there is no file missing.txt"),
        ],
    )
    def test_refused(self, measure: Measure, text: str | bytes, args: list[str], message: str) -> None:
        assert_refused(measure(*args, text=text), message)

    @pytest.mark.usefixtures("untouched")
    def test_one_token_without_bos(self, measure: Measure, plain: Path) -> None:
        assert_refused(measure(text="a", model=plain), "the text is too short: 1 token(s)")

    def test_one_token_behind_bos(self, measure: Measure) -> None:
        assert json.loads(measure("--json", text="a").out)["tokens"] == 1

    def test_text_is_asked_for(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_info:
            main(["perplexity", str(folder)])
        assert exit_info.value.code == 2
        assert "--text" in capsys.readouterr().err


def test_cache_is_the_one_of_generation(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in it shows."""
    model, tokens = tiny_model(), random_ids(1, 40)[0] % 64
    sound = perplexity(model, tokens, context=16).nats_per_token
    attend = KVCache.attend

    def blurred(cache: KVCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attend(cache, layer_idx, q, k, v.roll(1, -1), **options)

    monkeypatch.setattr(KVCache, "attend", blurred)
    monkeypatch.setattr(KVCache, "table", lambda *_: None)  # kernels would not ask `attend`
    assert perplexity(model, tokens, context=16).nats_per_token != pytest.approx(sound, rel=1e-3)

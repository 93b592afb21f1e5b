"""Hub ids, against a server on loopback that answers as the hub does. Each case runs in a process of its own, because
huggingface_hub reads its settings when it is imported."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from checkpoints import reference_model, save_folder, save_gguf
from forked import run_forked

from infer import progress
from infer.loader.hub import _progress_bar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/tiny"
GATED = "someone/gated"


class Hub(ThreadingHTTPServer):
    """Serves one folder as the repository REPO, and records requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[str] = []  # "GET path"
        self.unavailable: set[str] = set()  # files whose download breaks off
        self.given_up = threading.Event()
        self.silent = False  # takes requests for lists of files, and never answers

    def start(self) -> None:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def stop(self) -> None:
        self.given_up.set()
        if self.thread.is_alive():
            self.shutdown()
            self.thread.join()
            self.server_close()

    def downloads(self) -> list[str]:
        """Files fetched since the last call."""
        found = [request.rpartition("/")[2] for request in self.requests if request.startswith("GET /someone")]
        self.requests.clear()
        return found


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        if GATED in path:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {GATED} is restricted"})
        elif path.startswith(f"/api/models/{REPO}/") and path.split("/")[6] not in ("main", "v1", COMMIT):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self.answer(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(f"/api/models/{REPO}/tree/") and self.server.silent:
            self.server.given_up.wait()
        elif path.startswith(f"/api/models/{REPO}/tree/"):
            self.answer(200, json.dumps([self.entry(file) for file in self.files()]).encode())
        elif path.startswith(f"/{REPO}/resolve/"):
            self.send_file(path.split("/", 5)[5])
        elif path.startswith((f"/{REPO}/", f"/api/models/{REPO}")):
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    do_HEAD = do_GET

    def files(self) -> list[Path]:
        return sorted(self.server.folder.iterdir())

    def entry(self, file: Path) -> dict[str, Any]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": etag(file)}

    def send_file(self, name: str) -> None:
        file = self.server.folder / name
        if not file.exists():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "GET" and name in self.server.unavailable:
            self.answer(500, b"", headers)
        else:
            self.answer(200, file.read_bytes(), headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def etag(file: Path) -> str:
    """As the hub has it: large files by their SHA-256."""
    kind = hashlib.sha256 if file.suffix in (".safetensors", ".gguf") else hashlib.sha1
    return kind(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = save_folder(reference_model(num_hidden_layers=2), tmp_path / "repo", max_shard_size="60KB")
    (folder / "README.md").write_text("A file that no one needs.")
    (folder / "pytorch_model.bin").write_bytes(b"nor this one")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    save_gguf(reference_model(num_hidden_layers=2), folder / "tiny.gguf")
    server = Hub(folder)
    server.start()
    yield server
    server.stop()


Run = Callable[[str], str]


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """Runs Python code as a user of the hub would; its last line is returned."""

    def run(code: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return run_forked(code, inherited | settings).strip().splitlines()[-1]

    return run


GENERATE = """
from infer import SamplingParams, Tokenizer, generate, load_model, render_chat_template
name = {name!r}
model, config = load_model(name, dtype="float32", device="cpu")
tokenizer = Tokenizer(name)
print(generate(model, tokenizer, tokenizer.encode("Hello"), SamplingParams(max_new_tokens=6)).token_ids)
"""
CONFIG = "from infer import ModelConfig\nprint(ModelConfig.from_pretrained({name!r}).num_hidden_layers)"
FAIL = """
from infer import load_model
try:
    load_model({name!r}, device="cpu")
except (OSError, ValueError) as error:
    import json
    print(json.dumps([type(error).__name__, str(error)]))
"""


def failure(run: Run, name: str) -> tuple[str, str]:
    kind, message = json.loads(run(FAIL.format(name=name)))
    assert "\n" not in message
    assert name in message
    return kind, message


@pytest.fixture
def expected_tokens(hub: Hub) -> str:
    from infer import SamplingParams, Tokenizer, generate, load_model

    model, _ = load_model(hub.folder, dtype="float32", device="cpu")
    tokenizer = Tokenizer(hub.folder)
    return str(generate(model, tokenizer, tokenizer.encode("Hello"), SamplingParams(max_new_tokens=6)).token_ids)


def test_generate_then_offline(hub: Hub, run: Run, expected_tokens: str) -> None:
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    downloads = hub.downloads()
    assert len(downloads) == len(set(downloads))  # nothing twice
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < set(downloads)
    assert len([name for name in downloads if name.endswith(".safetensors")]) > 2
    assert not {"README.md", "pytorch_model.bin", "tiny.gguf"} & set(downloads)
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    assert hub.requests == []  # all from the cache
    hub.stop()
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    assert run(CONFIG.format(name=REPO)) == "2"


def test_config_and_tokenizer_fetch_no_weights(hub: Hub, run: Run) -> None:
    assert run(CONFIG.format(name=REPO)) == "2"
    assert run(f"from infer import Tokenizer\nprint(Tokenizer({REPO!r}).chat_template)") == "{{ messages[0].content }}"
    assert not [name for name in hub.downloads() if name.endswith((".safetensors", ".gguf"))]


def test_weights_after_config(hub: Hub, run: Run, expected_tokens: str) -> None:
    """The settings alone in the cache are no model."""
    run(CONFIG.format(name=REPO))
    hub.requests.clear()
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    assert "config.json" not in hub.downloads()


def test_gguf_file(hub: Hub, run: Run, expected_tokens: str) -> None:
    name = f"{REPO}/tiny.gguf"
    assert run(GENERATE.format(name=name)) == expected_tokens
    assert hub.downloads() == ["tiny.gguf"]
    hub.stop()
    assert run(GENERATE.format(name=name)) == expected_tokens


def test_interrupted_fetch_is_completed(hub: Hub, run: Run, expected_tokens: str) -> None:
    last = sorted(hub.folder.glob("model-*.safetensors"))[-1].name
    hub.unavailable = {last}
    kind, _ = failure(run, REPO)
    assert kind == "OSError"
    hub.unavailable = set()
    hub.downloads()
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    assert last in hub.downloads()


def test_shard_lost_from_the_cache(hub: Hub, run: Run, tmp_path: Path, expected_tokens: str) -> None:
    run(GENERATE.format(name=REPO))
    hub.downloads()
    lost = sorted((tmp_path / "hf").rglob("snapshots/*/model-*.safetensors"))[0]
    lost.unlink()
    assert run(GENERATE.format(name=REPO)) == expected_tokens
    assert set(hub.downloads()) <= {lost.name}


def test_unknown_repository(run: Run) -> None:
    kind, message = failure(run, "someone/nothing")
    assert kind == "FileNotFoundError"
    assert "the hub has no model" in message


def test_unknown_file(run: Run) -> None:
    kind, _ = failure(run, f"{REPO}/nothing.gguf")
    assert kind in ("OSError", "FileNotFoundError")


@pytest.mark.parametrize("name", [GATED, f"{GATED}/tiny.gguf"])
def test_gated_repository(run: Run, name: str) -> None:
    kind, message = failure(run, name)
    assert kind == "OSError"
    assert "is gated: accept its license" in message


def test_repository_without_settings(hub: Hub, run: Run) -> None:
    (hub.folder / "config.json").unlink()
    kind, message = json.loads(run(FAIL.format(name=REPO)))
    assert kind == "FileNotFoundError"
    assert f"{REPO} has no config.json; to use a GGUF file of it, name the file: {REPO}/FILE.gguf" in message


def test_an_architecture_that_is_not_supported(hub: Hub, run: Run) -> None:
    """It is refused before the weights are downloaded."""
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    kind, message = json.loads(run(FAIL.format(name=REPO)))
    assert kind == "ValueError"
    assert "architecture 'mamba' is not supported; supported: " in message
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


@pytest.mark.parametrize("tokenizer", ["tekken.json", "tokenizer.model"])
def test_a_repository_with_another_tokenizer(hub: Hub, run: Run, tokenizer: str) -> None:
    """Complete without tokenizer.json: nothing is fetched a second time."""
    (hub.folder / "tokenizer.json").rename(hub.folder / tokenizer)
    load = f"from infer import load_model\nprint(load_model({REPO!r}, device='cpu')[1].num_hidden_layers)"
    assert run(load) == "2"
    assert tokenizer in hub.downloads()
    hub.stop()
    assert run(load) == "2"


@pytest.mark.parametrize("name", [REPO, f"{REPO}/tiny.gguf"])
def test_server_down(hub: Hub, run: Run, name: str) -> None:
    hub.stop()
    kind, message = failure(run, name)
    assert kind == "OSError"
    assert "could not fetch" in message


def test_short_name_without_the_hub(hub: Hub, run: Run) -> None:
    """The error names the hub id, and says what a gated model needs."""
    hub.stop()
    gated = json.loads(run(FAIL.format(name="llama-3.2-1b")))[1]
    assert gated.startswith("could not fetch meta-llama/Llama-3.2-1B-Instruct from the hub: ")
    assert "(meta-llama/Llama-3.2-1B-Instruct is gated: accept its license on its hub page, then run " in gated
    free = json.loads(run(FAIL.format(name="qwen3-0.6b")))[1]
    assert free.startswith("could not fetch Qwen/Qwen3-0.6B from the hub: ")
    assert "gated" not in free


FETCH = """
import json, os, shutil, time
from pathlib import Path
from infer.loader import hub
from infer.loader.hub import fetch, remove
repo = {repo!r}
os.environ["INFER_CACHE"] = os.environ["HF_HOME"] + "/infer"
def tell(function, *args, **options):  # of a failure, what it says
    try:
        return str(function(*args, **options))
    except (OSError, ValueError) as error:
        return type(error).__name__ + ": " + str(error)
def get(suffix="/tiny.gguf", **options):
    return tell(fetch, repo + suffix, weights=True, **options)
print(json.dumps({code}))
"""


def evaluate(run: Run, *expressions: str) -> list[Any]:
    """What these give, one after the other, in one process."""
    return json.loads(run(FETCH.format(repo=REPO, code=f"[{', '.join(expressions)}]")))


def test_revision(hub: Hub, run: Run) -> None:
    folder, file, missing = evaluate(run, "get('@v1')", f"get('/tiny.gguf@{COMMIT}')", "get('@v2')")
    assert any("/revision/v1" in request for request in hub.requests)
    assert Path(folder).name == COMMIT
    assert (Path(folder) / "config.json").exists()
    assert file == f"{folder}/tiny.gguf"
    assert missing == f"FileNotFoundError: {REPO} has no revision v2: {REPO}@v2 is not on the hub"
    hub.stop()
    offline, missing = evaluate(run, "get('@v1')", "get('@v2')")
    assert offline == folder
    assert missing.startswith(f"OSError: could not fetch {REPO}@v2 from the hub: ")


def test_damaged_file(hub: Hub, run: Run) -> None:
    """Noticed at once when its size or time has changed, else by `infer pull`; fetched again."""
    good = (hub.folder / "tiny.gguf").read_bytes()
    hashes = evaluate(
        run,
        "path := get()",
        "size := os.path.getsize(path)",
        "os.truncate(path, 100)",
        "os.path.getsize(get())",
        "stamp := os.stat(path).st_mtime_ns",
        "Path(path).write_bytes(bytes(size))",
        "os.utime(path, ns=(stamp, stamp))",
        "Path(get()).read_bytes() == bytes(size)",
        "Path(get(check=True)).read_bytes() == bytes(size)",
        "get(force=True)",
    )
    path, size, _, mended, *_, unnoticed, noticed, forced = hashes
    assert size == mended == len(good)
    assert (unnoticed, noticed) == (True, False)
    assert forced == path
    assert Path(path).read_bytes() == good
    assert hub.downloads() == ["tiny.gguf"] * 4


def test_a_hub_that_sends_something_else(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "etag", lambda file: "0" * 64)
    assert evaluate(run, "get()") == [
        f"OSError: could not fetch {REPO}/tiny.gguf from the hub: tiny.gguf does not match its hash on the hub"
    ]


def test_remove(hub: Hub, run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "hf/hub" / f"models--{REPO.replace('/', '--')}"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs/1234.5678.incomplete").write_bytes(b"half of a download that was killed")
    _, blobs, one_file, unknown, freed, again = evaluate(
        run,
        "get()",
        f"os.listdir({str(repository / 'blobs')!r})",
        "tell(remove, repo + '/tiny.gguf')",
        "tell(remove, repo + '@v2')",
        "tell(remove, repo)",
        "tell(remove, repo)",
    )
    assert blobs == [etag(hub.folder / "tiny.gguf")]
    assert (
        one_file == f"ValueError: {REPO}/tiny.gguf is one file of {REPO}: remove the repository with `infer rm {REPO}`"
    )
    assert unknown == f"FileNotFoundError: {REPO}@v2 is not cached"
    assert int(freed) == (hub.folder / "tiny.gguf").stat().st_size
    assert again == f"FileNotFoundError: {REPO} is not cached"
    assert not repository.exists()


def test_no_room(run: Run) -> None:
    _, told = evaluate(run, "setattr(shutil, 'disk_usage', lambda path: type('usage', (), {'free': 10}))", "get()")
    assert told.startswith(f"OSError: could not fetch {REPO}/tiny.gguf from the hub: Not enough free disk space")


def test_silent_server(hub: Hub, run: Run) -> None:
    hub.silent = True
    *_, told = evaluate(run, "setattr(hub, 'SECONDS', 0.2)", "setattr(time, 'sleep', lambda seconds: None)", "get('')")
    assert told.startswith(f"OSError: could not fetch {REPO} from the hub: ")


@pytest.mark.parametrize("disabled", [False, True])
def test_one_bar_for_all_files(
    disabled: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a listener, the hub's own bars are not drawn: one report counts all bytes."""
    module = importlib.import_module("huggingface_hub.utils.tqdm")
    monkeypatch.setattr(module, "are_progress_bars_disabled", lambda *name: disabled)
    heard: list[progress.Progress] = []
    bar = _progress_bar("someone/tiny")
    with progress.listen(heard.append):
        files, whole = bar(total=3), bar(total=0, name="huggingface_hub.snapshot_download")
        whole.total = 10
        files.update(1)
        whole.update(4)
        whole.update(6)
        files.close()
        whole.close()
    assert [(each.done, each.total, each.name) for each in heard[:2]] == [
        (4, 10, "someone/tiny"),
        (10, 10, "someone/tiny"),
    ]
    assert capfd.readouterr() == ("", "")

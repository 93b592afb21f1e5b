"""Tensor parallel for real: a model in several processes, against the same in one."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from amount import ALL, amount
from checkpoints import reference_model, save_folder
from commands import Run
from safetensors.torch import load_file, save_file
from waiting import until

from infer import LLM, KVCache, SamplingParams, Trace, generate
from infer.engine.engine import EngineFailed
from infer.engine.llm import Handle
from infer.parallel import launch
from infer.parallel.group import ProcessGroup

PROMPTS = ["hello there", "the quick brown fox", "a", "she sells sea shells by the sea shore, and he does too"]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With 9 heads, which neither 2 nor 4 processes share evenly."""
    model = reference_model(
        "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72, max_position_embeddings=512
    )
    return save_folder(model, tmp_path_factory.mktemp("split"))


def make(folder: Path, count: int, **options: object) -> LLM:
    return LLM(folder, device="cpu", tensor_parallel=count, cache_memory=4_000_000, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[LLM]:
    with make(folder, 1) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    with make(folder, 2) as llm:
        yield llm


def group_of(llm: LLM) -> ProcessGroup:
    group = llm.model.group  # type: ignore[attr-defined]
    assert isinstance(group, ProcessGroup)
    return group


class TestSameTexts:
    def test_many_requests(self, one: LLM, two: LLM) -> None:
        for params in (PARAMS, SamplingParams(max_new_tokens=9, temperature=1.2, seed=5, logprobs=1)):
            for a, b in zip(one.generate(PROMPTS, params), two.generate(PROMPTS, params), strict=True):
                assert (a.token_ids, a.logprobs, a.text) == (b.token_ids, b.logprobs, b.text)

    def test_score(self, one: LLM, two: LLM) -> None:
        assert one.score(PROMPTS[3], top=2) == two.score(PROMPTS[3], top=2)

    def test_prefix_caching(self, one: LLM, two: LLM) -> None:
        text = PROMPTS[3] * 2
        expected = one.generate(text + " so", PARAMS)
        two.generate(text + " and", PARAMS)
        found = two.generate(text + " so", PARAMS)
        assert found.num_cached_tokens >= 64
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)

    def test_sessions(self, one: LLM, two: LLM, tmp_path: Path) -> None:
        """Saved and loaded with their pages, which lie in both processes."""
        encode = lambda messages: one.encode(" ".join(each["content"] for each in messages))  # noqa: E731
        replies = []
        for llm in (one, two):
            session = llm.session(params=PARAMS, encode=encode)
            replies.append([session.send("hello there, how are you").token_ids])
            session.save(tmp_path / "session")
            llm.memory.index.evict(llm.memory.pool.num_pages)
            replies[-1].append(llm.load_session(tmp_path / "session", encode=encode).send("well").token_ids)
        assert replies[0] == replies[1]

    def test_a_store_knows_all_parts(self, folder: Path, tmp_path: Path) -> None:
        """Two models that differ only in what the second process has."""
        other = tmp_path / "other"
        shutil.copytree(folder, other)
        weights = load_file(other / "model.safetensors")
        weights["model.embed_tokens.weight"][-20:] *= -1.7
        save_file(weights, other / "model.safetensors", {"format": "pt"})
        prompt = [*range(100, 128)] * 12
        known = []
        for path in (folder, other):
            with make(path, 2, prefix_store=tmp_path / "store") as llm:
                for _ in range(2):
                    known.append(llm.generate(prompt, PARAMS).num_cached_tokens)
                    llm.memory.index.evict(llm.memory.pool.num_pages)  # then pages are read from the store
        assert known == [0, 320, 0, 320]

    def test_generate(self, one: LLM, two: LLM) -> None:
        """One request, with the cache that it makes, and without any."""
        prompt = one.encode(PROMPTS[1])
        expected = generate(one.model, one.tokenizer, prompt, PARAMS)
        for options in ({}, {"use_kv_cache": False}, {"cache_dtype": "int8"}):
            found = generate(two.model, two.tokenizer, prompt, PARAMS, **options)
            if "cache_dtype" in options:
                expected = generate(one.model, one.tokenizer, prompt, PARAMS, **options)
            assert found.token_ids == expected.token_ids

    def test_preemption(self, folder: Path, one: LLM) -> None:
        """With so little memory that rows have to give theirs up."""
        texts = [f"{i}, {PROMPTS[3]}" for i in range(5)]
        params = SamplingParams(max_new_tokens=80, ignore_eos=True)
        with LLM(folder, device="cpu", tensor_parallel=amount(4, 2), cache_memory=100_000) as llm:
            found = llm.generate(texts, params)
            assert llm.stats().preemptions > 0
        assert [each.token_ids for each in found] == [each.token_ids for each in one.generate(texts, params)]

    def test_experts_and_norms_of_all_heads(self, tmp_path: Path) -> None:
        """In three processes, two of which have the same key/value head."""
        path = save_folder(reference_model("olmoe"), tmp_path)
        found = []
        for count in (1, 3):
            with make(path, count) as llm:
                found.append([(each.token_ids, each.logprobs) for each in llm.generate(PROMPTS, PARAMS)])
        assert found[0] == found[1]

    @pytest.mark.skipif(not ALL, reason="starts many processes: a part of make test-all")
    @pytest.mark.parametrize("count", [2, 4])
    @pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "olmo2", "olmoe", "gpt_oss"])
    @pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantize": "int4"}], ids=str)
    def test_families(self, tmp_path: Path, family: str, options: dict[str, str], count: int) -> None:
        path = save_folder(reference_model(family), tmp_path)
        found = []
        for each in (1, count):
            with make(path, each, **options) as llm:
                texts = llm.generate([*PROMPTS, *PROMPTS], PARAMS)
                found.append([(text.token_ids, text.logprobs) for text in texts])
        assert found[0] == found[1]

    @pytest.mark.slow
    @pytest.mark.skipif(not ALL, reason="starts many processes: a part of make test-all")
    @pytest.mark.parametrize(("count", "options"), [(2, {"quantize": "int4"}), (4, {}), (2, {"dtype": "bfloat16"})])
    def test_smollm2(self, count: int, options: dict[str, str]) -> None:
        found = []
        params = SamplingParams(max_new_tokens=8 if options.get("dtype") else 24, logprobs=2)
        for each in (1, count):
            with LLM("smollm2-135m", tensor_parallel=each, cache_memory=100_000_000, **options) as llm:  # type: ignore[arg-type]
                texts = llm.generate(["The capital of France is", "Once upon a time", "水は"], params)
                found.append([(text.token_ids, text.logprobs) for text in texts])
        assert found[0] == found[1]


class TestRefusals:
    """Before any process has begun, and with nothing lost."""

    def test_trace(self, two: LLM) -> None:
        with pytest.raises(ValueError, match="trace in one process"):
            two.submit("hello", PARAMS, trace=Trace()).result()

    def test_cache_of_one_process(self, two: LLM) -> None:
        cache = KVCache.from_model_config(two.model.config, 64, dtype="float32", device="cpu")
        with pytest.raises(ValueError, match="a cache with pages in all processes"):
            generate(two.model, two.tokenizer, [5, 6, 7], PARAMS, cache=cache)

    def test_goes_on(self, one: LLM, two: LLM) -> None:
        assert two.generate("still here", PARAMS).token_ids == one.generate("still here", PARAMS).token_ids

    def test_too_many(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="9 attention heads cannot be split into 10 shards"):
            make(folder, 10)

    def test_a_model_that_is_loaded(self, one: LLM) -> None:
        with pytest.raises(TypeError, match="cannot be sharded: give its name"):
            LLM(one.model, one.tokenizer, tensor_parallel=2)

    def test_another_dtype(self, two: LLM) -> None:
        with pytest.raises(TypeError, match="load it again"):
            two.model.to(torch.bfloat16)  # type: ignore[attr-defined]

    def test_more_memory_than_all_have(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.machine.lazy_allocations", set())  # caches of other tests
        monkeypatch.setattr("infer.machine._system_memory", lambda: 10_000_000)
        with pytest.raises(ValueError, match="in each of 2 processes"):
            LLM(folder, device="cpu", tensor_parallel=2, cache_memory=6_000_000)
        monkeypatch.setattr("infer.machine._system_memory", lambda: 100_000)
        with pytest.raises(ValueError, match="for each of 2 processes"):
            make(folder, 2)

    def test_no_memory(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="bytes of cache are too few: 64 positions"):
            LLM(folder, device="cpu", tensor_parallel=2, cache_memory=10)


def stopped_in_a_pass(llm: LLM, child: subprocess.Popen[bytes]) -> Handle:
    """A request in a pass that does not end: one of its processes is stopped."""
    os.kill(child.pid, signal.SIGSTOP)
    handle = llm.submit("hello", PARAMS)
    until(lambda: llm.stats().steps > 0)
    return handle


class TestLoss:
    def test_under_way(self, folder: Path) -> None:
        """A process that is killed ends the run, with an error that names it, and no process stays behind."""
        llm = make(folder, 3)
        group = group_of(llm)
        handle = stopped_in_a_pass(llm, group.children[2])
        os.kill(group.children[2].pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="process 2 of 3 was ended by signal 9"):
            handle.result()
        with pytest.raises(RuntimeError, match="this LLM has failed, create another: process 2 of 3"):
            llm.generate("again", PARAMS)
        until(lambda: all(child.poll() is not None for child in group.children.values()))
        llm.close()

    def test_at_rest(self, folder: Path) -> None:
        """Nobody asks for anything, and the failure is known all the same."""
        with make(folder, 2) as llm:
            os.kill(group_of(llm).children[1].pid, signal.SIGKILL)
            until(lambda: llm.failure is not None)
            assert "process 1 of 2" in str(llm.failure)

    def test_of_the_leader(self, folder: Path) -> None:
        script = (
            "import os, signal, sys\nfrom infer import LLM\n"
            f"llm = LLM({str(folder)!r}, device='cpu', tensor_parallel=2, cache_memory=4_000_000)\n"
            "print(llm.model.group.children[1].pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == -signal.SIGKILL
        follower = int(done.stdout)
        until(lambda: not _runs(follower))

    def test_after_it_was_ready(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before the processes have met."""
        monkeypatch.setattr("infer.parallel.collectives.CONNECT_TIMEOUT", timedelta(seconds=0.1))
        await_children = launch._await_workers

        def then_kill(children: Any, store: Any) -> None:
            await_children(children, store)
            children[1].kill()

        monkeypatch.setattr(launch, "_await_workers", then_kill)
        with pytest.raises(RuntimeError):
            make(folder, 2)

    def test_of_the_leader_while_it_starts(self, folder: Path) -> None:
        script = (
            "import os, signal, sys\nfrom infer.parallel import launch\n"
            "def await_children(children, store):\n"
            "    print(children[1].pid, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "launch._await_workers = await_children\n"
            f"launch.load_sharded({str(folder)!r}, 2, device='cpu')\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == -signal.SIGKILL
        until(lambda: not _runs(int(done.stdout)))

    def test_interrupted_while_it_loads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The others wait for this process to have loaded: they are ended, not told to end."""

        def interrupt(*args: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("infer.parallel.tensor_parallel.load_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(folder, 2)

    def test_a_process_that_hangs(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("infer.engine.llm.PARALLEL_CLOSE_S", 0.5)
        llm = make(folder, 2)
        child = group_of(llm).children[1]
        stopped_in_a_pass(llm, child)
        llm.close()
        assert child.poll() == -signal.SIGKILL

    def test_a_process_that_is_stopped(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It still exists, but sends no heartbeats."""
        with make(folder, 2) as llm:
            child = group_of(llm).children[1]
            handle = stopped_in_a_pass(llm, child)
            monkeypatch.setattr("infer.parallel.group.MISSED_HEARTBEATS", 2)
            with pytest.raises(EngineFailed, match="process 1 of 2 has not answered"):
                handle.result()
            until(lambda: child.poll() == -signal.SIGKILL)

    def test_a_process_that_is_stopped_at_rest(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with make(folder, 2) as llm:
            monkeypatch.setattr("infer.parallel.group.MISSED_HEARTBEATS", 2)
            os.kill(group_of(llm).children[1].pid, signal.SIGSTOP)
            until(lambda: llm.failure is not None)
            assert "process 1 of 2 has not answered" in str(llm.failure)

    def test_a_long_message(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **options: Any) -> None:
            raise ValueError("水" * 5000)

        monkeypatch.setattr("infer.parallel.tensor_parallel.load_model", refuse)
        with pytest.raises(ValueError, match="水水"):
            make(folder, 2)

    def test_a_forked_process_ends_nothing(self, two: LLM) -> None:
        if (pid := os.fork()) == 0:
            group_of(two).close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert two.generate("hello", max_new_tokens=2).token_ids

    def test_nothing_keeps_it(self, folder: Path) -> None:
        """Neither the model, nor the processes, nor, with two of them, the number of threads."""
        threads = torch.get_num_threads()
        first, second = make(folder, 2), make(folder, 2)
        second.generate("hello", max_new_tokens=2)
        model = weakref.ref(second.model)
        children = [group_of(llm).children[1] for llm in (first, second)]
        first.close()
        second.close()
        assert [child.poll() for child in children] == [0, 0]
        assert torch.get_num_threads() == threads
        del second
        gc.collect()
        assert model() is None

    def test_before_it_is_ready(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "false")
        with pytest.raises(RuntimeError, match="process 1 of 2 has ended before it was ready"):
            make(folder, 2)


LIMITED = """
import resource, sys
from pathlib import Path
from infer import LLM
from infer.backend import cpu
folder, count, more = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cpu.kernels().prepare(set(), split=True)
used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (int(used.split()[1]) * 1024 + more,) * 2)
with LLM(folder, device="cpu", tensor_parallel=count, cache_memory=20_000_000) as llm:
    print(llm.generate("hello", max_new_tokens=4).token_ids)
"""


class TestMemory:
    @pytest.mark.skipif(not ALL, reason="writes a model of 500 MB: a part of make test-all")
    def test_what_one_process_may_not_hold(self, tmp_path: Path) -> None:
        """A model that a limit on memory keeps out of one process is loaded by three, each within that limit."""
        model = reference_model("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
        folder = save_folder(model, tmp_path, max_shard_size="60MB")  # files are mapped whole, and count meanwhile
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert size > 450e6

        def run(count: int) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", LIMITED, str(folder), str(count), str(int(size * 0.8))]
            return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

        refused = run(1)
        assert refused.returncode != 0
        assert "the weights need 0." in refused.stderr
        loaded = run(3)
        assert loaded.returncode == 0, loaded.stderr
        with LLM(folder, device="cpu", cache_memory=20_000_000) as llm:
            assert loaded.stdout.strip() == str(llm.generate("hello", max_new_tokens=4).token_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestGPU:
    @pytest.mark.parametrize(
        ("family", "dtype"),
        [
            ("llama", "bfloat16"),
            ("gemma3", "float32"),
            ("gpt2", "bfloat16"),
            ("olmoe", "bfloat16"),
            ("gpt_oss", "float32"),
        ],
    )
    def test_processes_that_share_a_gpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
    ) -> None:
        """Through the host's memory, as NCCL refuses to: the same kernels, and the same bits as in captured steps."""
        monkeypatch.setenv("INFER_COLLECTIVES", "gloo")
        path = save_folder(reference_model(family, max_position_embeddings=512), tmp_path)
        found = []
        for count in (1, 2):
            with LLM(path, device="cuda", dtype=dtype, tensor_parallel=count, cache_memory=8_000_000) as llm:
                texts = [(each.token_ids, each.logprobs) for each in llm.generate(PROMPTS, PARAMS)]
                found.append((texts, llm.score(PROMPTS[3] * 2)))
        assert found[0] == found[1]

    def test_too_few_gpus(self, folder: Path) -> None:
        count = torch.cuda.device_count() + 1
        with pytest.raises(ValueError, match=f"{count} processes need a GPU each"):
            LLM(folder, device="cuda", tensor_parallel=count)

    def test_nccl(self) -> None:
        """As far as one GPU goes: one process, whose collectives are copies."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
        device = torch.device("cuda", 0)
        group = ProcessGroup(store, 0, 1, device, collectives="nccl", local=True)
        x = torch.randn(5, 7, device=device, dtype=torch.bfloat16)
        assert torch.equal(group.all_gather(x, [7]), x)
        assert torch.equal(group.combine(x, torch.ones(5, dtype=torch.bool, device=device)), x)
        group.synchronize()
        assert group.gather_objects(3) == [3]
        group.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestCommands:
    OPTIONS = ("--device", "cpu", "--max-new-tokens", "8")

    def test_generate(self, folder: Path, run: Run) -> None:
        expected = run("generate", "hello", *self.OPTIONS, model=folder)
        assert expected.status == 0
        assert expected.out.strip()
        for command in self.commands(folder)[: amount(2, 1)]:
            done = subprocess.run([*command, "hello"], capture_output=True, text=True, timeout=600, check=True)
            assert done.stdout == expected.out

    @pytest.mark.skipif(not ALL, reason="starts many processes: a part of make test-all")
    def test_torchrun(self, folder: Path) -> None:
        """The first process alone reads what is piped; and one model after another can be split."""
        command = self.commands(folder)[1]
        done = subprocess.run(
            [*command, "-"], input="hello there", capture_output=True, text=True, timeout=600, check=True
        )
        assert "10 prompt tokens" in done.stderr
        script = folder.parent / "twice.py"
        script.write_text(
            "from infer import LLM\n"
            "for _ in range(2):\n"
            f"    with LLM({str(folder)!r}, device='cpu', tensor_parallel=2, cache_memory=4_000_000) as llm:\n"
            "        print(llm.generate('hello', max_new_tokens=4).token_ids)\n"
        )
        run = [*command[: command.index("-m", 3)], str(script)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=600, check=True)
        first, second = done.stdout.splitlines()
        assert first == second

    def commands(self, folder: Path) -> list[list[str]]:
        options = ["generate", "--model", str(folder), *self.OPTIONS, "--tensor-parallel", "2"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [
            [sys.executable, "-m", "infer", *options],
            [*torchrun, "-m", "infer", *options],
        ]

    def test_verify(self, folder: Path, tmp_path: Path, run: Run) -> None:
        prompts = tmp_path / "prompts"
        prompts.write_text(amount("hello there\nthe quick brown fox\n", "hello me\nfox\n"))
        options = ["--device", "cpu", "--prompts", prompts, "--max-new-tokens", amount("4", "2")]
        done = run("verify", *options, "--tensor-parallel", "2", "--all", model=folder)
        assert done.status == 0, done.out + done.err
        assert "2 processes, PagedCache, prefix hit" in done.out
        assert "DIFFERS" not in done.out
        announced = next(line for line in done.err.splitlines() if "paths to run" in line).split()[0]
        assert f"{announced} of {announced} paths give the same bits" in done.err

    @pytest.mark.parametrize("restarts", amount([False, True], [True]))
    def test_serve(self, folder: Path, restarts: bool) -> None:
        """When a process is lost, the server exits, or goes on with other processes."""
        import httpx2 as httpx

        command = [sys.executable, "-m", "infer", "serve", str(folder), "--device", "cpu", "--port", "0"]
        command += ["--tensor-parallel", "2", "--cache-memory", "4MB", *["--restart-engine"] * restarts]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, ExitStack() as failing:
            failing.callback(server.kill)  # else leaving the block waits for it
            assert server.stderr is not None
            line = next(line for line in server.stderr if "/v1" in line)
            url = line.split(" at ")[1].split("/v1")[0]
            body = {"model": folder.name, "prompt": "hello", "max_tokens": 5, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()
            assert answer["usage"]["completion_tokens"] <= 5
            [worker] = _workers_of(server.pid)
            os.kill(worker, signal.SIGKILL)
            if restarts:
                until(lambda: server.poll() is not None or _workers_of(server.pid) not in ([], [worker]))
                until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
                assert (
                    httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()["choices"] == answer["choices"]
                )
                server.terminate()
            assert server.wait(600) == (not restarts)
            assert "process 1 of 2 was ended by signal 9" in server.stderr.read()


def _workers_of(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children").split()
    ]
    return [child for child in children if b"infer.parallel" in _read(Path(f"/proc/{child}/cmdline"))]


def _read(file: Path) -> bytes:
    """Of a thread or a process that may have ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return file.read_bytes()
    return b""

"""Two replicas of SmolLM2 on a real Ray Serve: OpenAI's client, a replica that is killed, routing, an update."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx2 as httpx
import openai
import pytest
from amount import ALL
from openai import OpenAI
from serving import until

from infer import LLM
from infer.cli.common import DEFAULT_MODEL
from infer.deploy.options import DeployOptions
from infer.server.run import listen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="takes minutes: INFER_TEST_ALL=1 runs it"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'infer-kv[ray]'"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
WAIT = 120.0  # seconds: longer than anything takes
KEY = "secret"


class Deployed:
    def __init__(self, options: DeployOptions) -> None:
        self.options, self.url = options, f"http://127.0.0.1:{options.port}"

    def openai(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT)

    def change(self, **options: Any) -> None:
        """Deploy it again, otherwise."""
        from ray import serve

        from infer.deploy.app import build
        from infer.deploy.run import NAME

        self.options = self.options.model_copy(update=options)
        serve.run(build(self.options), name=NAME, route_prefix="/")

    def metric(self, name: str) -> list[float]:
        """Of each replica."""
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT).text
        return [float(value) for value in re.findall(rf"^infer:{name}{{replica=.*}} (.*)$", text, re.MULTILINE)]

    def replicas(self) -> list[str]:
        import ray

        actors = ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if "#Replica#" in actor["name"]]

    def kill(self, name: str) -> None:
        import ray

        ray.kill(ray.get_actor(name, namespace="serve"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, quantize="int4", cache_memory=10**8) as llm:
        yield llm


@pytest.fixture(scope="module")
def deployed(llm: LLM) -> Iterator[Deployed]:
    from infer.deploy.run import deployed

    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
    options = DeployOptions(
        model=DEFAULT_MODEL,
        quantize="int4",
        replicas=2,
        threads=1,
        cache_memory=3 * 10**8,
        port=port,
        api_keys=frozenset({KEY}),
        drain_seconds=60,
    )
    with deployed(options):
        yield Deployed(options)


@pytest.fixture
def client(deployed: Deployed) -> Iterator[OpenAI]:
    until(lambda: len(deployed.metric("num_requests_running")) == 2, WAIT)  # also after a test that has killed one
    with deployed.openai() as client:
        yield client
    until(lambda: not sum(deployed.metric("num_requests_running")), WAIT)


def test_arguments_of_a_config_are_checked() -> None:
    """Ray makes the options of a config's `args` where the builder says so by its type."""
    from infer.deploy.app import build

    assert inspect.signature(build).parameters["options"].annotation is DeployOptions


class TestClient:
    def test_same_text_as_alone(self, client: OpenAI, llm: LLM) -> None:
        settings: Any = {"model": DEFAULT_MODEL, "max_tokens": 16, "logprobs": 2}
        for prompt, temperature in (("The capital of France is", 0.0), ("Once upon a time", 0.9)):
            answer = client.completions.create(prompt=prompt, temperature=temperature, seed=7, **settings).choices[0]
            expected = llm.generate(prompt, max_new_tokens=16, temperature=temperature, seed=7, logprobs=2)
            assert answer.text == expected.text
            assert answer.logprobs is not None
            assert expected.logprobs is not None
            assert answer.logprobs.token_logprobs == [each.logprob for each in expected.logprobs]

    def test_stream(self, client: OpenAI, llm: LLM) -> None:
        messages: Any = [{"role": "user", "content": "Why is the sky blue?"}]
        chunks = list(
            client.chat.completions.create(
                model=DEFAULT_MODEL, messages=messages, max_tokens=24, temperature=0, stream=True
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == llm.chat(messages, max_new_tokens=24).text
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_errors(self, deployed: Deployed, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=DEFAULT_MODEL, prompt="x", temperature=-1)
        with deployed.openai("wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.APIStatusError, match="replicas share no state") as error:
            client.post("/sessions", cast_to=object)
        assert error.value.status_code == 501

    def test_one_who_leaves_frees_the_row(self, deployed: Deployed, client: OpenAI) -> None:
        stream = client.completions.create(
            model=DEFAULT_MODEL, prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert sum(deployed.metric("num_requests_running")) == 1
        stream.close()
        until(lambda: not sum(deployed.metric("num_requests_running")), 10)


class TestRouting:
    def hit_rate(self, deployed: Deployed, client: OpenAI, name: str) -> float:
        """Of six documents that are asked about four times, by turns: the share of tokens that were in a cache."""
        before = sum(deployed.metric("prefix_cache_hits_total")), sum(deployed.metric("prefix_cache_queries_total"))
        for question in ("Who?", "When?", "Where?", "Why?"):
            for document in range(6):
                prompt = f"{name} {document}: " + f"The report says {document} things about the sea. " * 40 + question
                client.completions.create(model=DEFAULT_MODEL, prompt=prompt, max_tokens=1)
        after = sum(deployed.metric("prefix_cache_hits_total")), sum(deployed.metric("prefix_cache_queries_total"))
        return (after[0] - before[0]) / (after[1] - before[1])

    def test_requests_at_once_are_shared_evenly(self, deployed: Deployed, client: OpenAI) -> None:
        settings: Any = {"model": DEFAULT_MODEL, "max_tokens": 32, "extra_body": {"ignore_eos": True}}
        before = deployed.metric("generation_tokens_total")
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i: client.completions.create(prompt=f"Number {i}", **settings), range(16)))
        after = deployed.metric("generation_tokens_total")
        assert sorted((b - a) / 32 for a, b in zip(before, after, strict=True))[0] >= 7

    def test_an_update_without_a_failed_request_then_without_routing(self, deployed: Deployed, client: OpenAI) -> None:
        with_routing = self.hit_rate(deployed, client, "first")
        over, answered = threading.Event(), []

        def go_on_asking(i: int) -> None:
            with deployed.openai() as client:
                while not over.is_set():
                    stream = client.completions.create(
                        model=DEFAULT_MODEL, prompt=f"Number {i}", max_tokens=20, stream=i % 2 == 0
                    )
                    last = list(stream)[-1] if i % 2 == 0 else stream
                    answered.append(last.choices[0].finish_reason)

        before = set(deployed.replicas())
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(go_on_asking, i) for i in range(4)]
            try:
                deployed.change(prefix_routing=False)
                until(lambda: not before & set(deployed.replicas()) and len(deployed.replicas()) == 2, WAIT)
            finally:
                over.set()
            for each in asking:
                each.result(WAIT)
        assert len(answered) > 10
        assert set(answered) <= {"length", "stop"}

        without = self.hit_rate(deployed, client, "second")
        deployed.change(prefix_routing=True)
        print(f"hit rate {with_routing:.0%} with routing by prefix, {without:.0%} without")
        assert with_routing > 0.65
        assert without < with_routing


class TestDeath:
    def test_a_replica_is_killed_under_load(self, deployed: Deployed, client: OpenAI, llm: LLM) -> None:
        """What has not begun is answered by the other; what has, ends with an error. Nothing hangs."""
        settings: Any = {"model": DEFAULT_MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
        begun = threading.Semaphore(0)

        def streamed(i: int) -> str:
            last = None
            try:
                for chunk in client.completions.create(prompt=f"Story {i}", max_tokens=200, stream=True, **settings):
                    if last is None:
                        begun.release()
                    last = chunk.choices[0].finish_reason or "going on"
            except openai.APIError as error:
                return f"error: {error}"
            return str(last)

        def whole(i: int) -> str:
            return client.completions.create(prompt=f"Tale {i}", max_tokens=60, **settings).choices[0].text

        with ThreadPoolExecutor(16) as pool:
            streams = [pool.submit(streamed, i) for i in range(6)]
            for _ in streams:
                assert begun.acquire(timeout=WAIT)
            texts = [pool.submit(whole, i) for i in range(8)]
            until(lambda: min(deployed.metric("num_requests_running")) >= 5, WAIT)
            deployed.kill(deployed.replicas()[0])
            ends = [stream.result(WAIT) for stream in streams]
            found = [text.result(WAIT) for text in texts]
        assert found == [llm.generate(f"Tale {i}", max_new_tokens=60, ignore_eos=True).text for i in range(8)]
        assert set(ends) == {"length", "error: the replica that was answering has failed"}
        until(lambda: len(deployed.metric("num_requests_running")) == 2, WAIT)  # Ray has started another

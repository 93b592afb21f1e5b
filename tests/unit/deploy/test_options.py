"""What a deployment may be asked for, and what each replica gets of its machine. Ray is not needed for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Done, assert_refused, folder  # noqa: F401

from infer.cli import main
from infer.deploy.options import DeployOptions, resources_for


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": each} for each in resources] + [{"Alive": False, "Resources": {"CPU": 1}}]


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"replicas": 0}, "greater than or equal to 1"),
            ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2, less than replicas, 3"),
            ({"prefill_chunk": 0}, "prefill_chunk"),
            ({"tensor_parallel": 0}, "greater than or equal to 1"),
            ({"replica": 2}, "Extra inputs"),
        ],
    )
    def test_refused(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DeployOptions(model="m", **given)

    def test_name(self) -> None:
        assert DeployOptions(model="some/folder/").model_id == "folder"
        assert DeployOptions(model="m", name="n").model_id == "n"


class TestPlaces:
    def test_replicas_of_a_machine_share_its_cores(self) -> None:
        assert resources_for(DeployOptions(model="m", replicas=3), nodes({"CPU": 8})) == (2, 0, 3)
        assert resources_for(DeployOptions(model="m", replicas=1, max_replicas=4), nodes({"CPU": 8})) == (2, 0, 4)
        assert resources_for(DeployOptions(model="m", replicas=5), nodes({"CPU": 2})) == (1, 0, 5)

    def test_machines_share_the_replicas(self) -> None:
        assert resources_for(DeployOptions(model="m", replicas=4), nodes({"CPU": 8}, {"CPU": 6})) == (3, 0, 2)

    def test_as_many_threads_as_asked_for(self) -> None:
        assert resources_for(DeployOptions(model="m", threads=3), nodes({"CPU": 8})).threads == 3
        with pytest.raises(ValueError, match="threads is 9, but a machine of this cluster has 8 CPUs"):
            resources_for(DeployOptions(model="m", threads=9), nodes({"CPU": 8}))

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_gpus(self, device: str) -> None:
        place = resources_for(
            DeployOptions(model="m", replicas=2, tensor_parallel=2, device=device), nodes({"CPU": 8, "GPU": 4})
        )
        assert (place.gpus, place.neighbors) == (2, 1)

    def test_a_core_for_each_rank(self) -> None:
        assert resources_for(DeployOptions(model="m", replicas=2, tensor_parallel=2), nodes({"CPU": 2})).threads == 2

    def test_a_cpu_beside_gpus(self) -> None:
        assert resources_for(DeployOptions(model="m", device="cpu"), nodes({"CPU": 8, "GPU": 4})).gpus == 0


class TestCommand:
    @pytest.fixture
    def refuse(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:  # noqa: F811
        def check(message: str, *args: str) -> None:
            with pytest.raises(SystemExit) as ending:
                main(["deploy", str(folder), "--port", "0", *args])
            assert_refused(Done(ending.value.code, *capsys.readouterr()), message)  # type: ignore[arg-type]

        return check

    def test_without_ray(self, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        refuse("pip install 'infer-kv[ray]'")

    def test_what_cannot_be(self, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        """Before Ray is started."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        refuse("max_replicas is 2, less than replicas, 3", "--replicas", "3", "--max-replicas", "2")
        refuse("--cache-memory must be a size", "--cache-memory", "much")
        refuse("quantize must be one of", "--quantize", "int3")
        refuse("prefill_chunk", "--prefill-chunk", "0")

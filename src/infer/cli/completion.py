"""What the shell completes: names of models, and choices of options. Without torch, since each TAB runs this."""

from collections.abc import Callable

from infer.loader.builtin import BUILTIN
from infer.loader.hub import cached_models
from infer.loader.hub_names import HUB_MODELS


def model_names() -> list[str]:
    """Short names, and hub ids of other cached models. If none matches, the shell completes files."""
    return list(dict.fromkeys((*BUILTIN, *HUB_MODELS, *cached_names())))


def cached_names() -> list[str]:
    names = {model.repo: name for name, model in HUB_MODELS.items()}
    of_hub = [names.get(repo, repo) for repo, _ in cached_models()]
    return [*(name for name, model in BUILTIN.items() if model.is_cached), *of_hub]


def choices(*values: str) -> Callable[[], list[str]]:
    return lambda: list(values)


DTYPES = choices("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = choices("auto", "cpu", "cuda", "mps", "xpu")
QUANTIZE = choices("auto", "int4", "int8")
CACHE_DTYPES = choices("auto", "int8")
ON_FULL = choices("error", "recompute")

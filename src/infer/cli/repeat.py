"""A traced run again: its options read from a page, and what came out compared."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli.common import Loading
from infer.engine.params import SamplingParams
from infer.values import shown

if TYPE_CHECKING:
    from infer.trace.repeat import SavedRun

LOOKING_ONLY = {"layers", "heads", "alternatives", "prompt_rows", "threads"}  # which change no token
PROMPT_OPTIONS = {"prompt", "chat", "system", "thinking", "model"}  # that change how the prompt is encoded


@dataclass(frozen=True)
class TraceOptions:
    """What a traced run depends on, by the names of the options."""

    model: str
    prompt: str | None
    chat: bool
    system: str | None
    thinking: bool | None
    prefill_chunk: int | None
    kv_cache: bool
    cache_dtype: str
    on_full: str
    layers: str | None
    heads: str
    alternatives: int
    prompt_rows: int
    loading: Loading
    params: SamplingParams

    def settings(self) -> dict[str, Any]:
        """What a page has to keep beside the settings that the engine knows."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "chat": self.chat,
            "system": self.system,
            "thinking": self.thinking,
            "device": self.loading.device,
            "quantize": self.loading.quantize,
        }


def overridden(given: Collection[str]) -> set[str]:
    """Of the options that were given, those that the tokens depend on."""
    names = {field.name for kind in (TraceOptions, Loading, SamplingParams) for field in fields(kind)}
    return names.intersection(given) - LOOKING_ONLY


def repeated(
    options: TraceOptions, saved: "SavedRun", given: Collection[str], path: Path
) -> tuple[TraceOptions, list[int] | None]:
    """The options of a saved run, but for those given; and the prompt's tokens, None: its text is to be encoded."""
    settings = saved.settings
    model = settings.get("model")
    if model is None and "model" not in given:
        raise ValueError(f"{path} does not say which model it ran: give it with --model")
    try:
        params = _params(settings["params"])
        loading = Loading(dtype=settings["dtype"], device=settings["device"], quantize=settings["quantize"])
        read = TraceOptions(
            model=options.model if model is None else _checked("model", model, str),
            prompt=_checked("prompt", settings.get("prompt"), str, None),
            chat=_checked("chat", settings.get("chat", False), bool),
            system=_checked("system", settings.get("system"), str, None),
            thinking=_checked("thinking", settings.get("thinking"), bool, None),
            prefill_chunk=settings["prefill_chunk"],
            kv_cache=_checked("kv_cache", settings["kv_cache"], bool),
            cache_dtype=settings["cache_dtype"],
            on_full=settings["on_full"],
            layers=",".join(map(str, saved.layers)) or None,
            heads=",".join(map(str, saved.heads)) or "all",
            alternatives=_checked("top_k", settings["top_k"], int),
            prompt_rows=_checked("prompt_rows", settings["prompt_rows"], int),
            loading=replace(loading, **_given(options.loading, given)),
            params=replace(params, **_given(options.params, given)),
        )
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a page of a trace that can be repeated: {reason}") from None
    merged = replace(read, **_given(options, set(given) - {"loading", "params"}))
    encoding = PROMPT_OPTIONS.intersection(given)
    if not encoding or (encoding == {"model"} and read.prompt is None):
        return merged, saved.prompt
    if merged.prompt is None:
        raise ValueError(f"{path} holds the tokens of its prompt alone: give the prompt as well")
    return merged, None


def compared(saved: "SavedRun", tokens: Sequence[int], texts: Sequence[str], path: Path) -> tuple[bool, str]:
    """Whether the tokens are the same, as far as both runs go; and that in words."""
    both = min(len(tokens), len(saved.tokens))
    at = next((i for i in range(both) if tokens[i] != saved.tokens[i]), None)
    if at is not None:
        return False, f"OTHER tokens than in {path} from step {at + 1} on: {texts[at]!r}, not {saved.texts[at]!r}"
    if len(tokens) == len(saved.tokens):
        return True, f"the same {both} tokens as in {path}"
    return True, f"the same first {both} tokens as in {path}, which has {len(saved.tokens)} of them, not {len(tokens)}"


def _params(saved: Any) -> SamplingParams:
    """Without what a trace does not print."""
    bias = {int(token): float(bias) for token, bias in dict(saved["logit_bias"]).items()}
    return SamplingParams(**saved | {"logit_bias": bias, "n": 1, "logprobs": None, "prompt_logprobs": None})


def _given(options: Any, given: Collection[str]) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name in given}


def _checked(name: str, value: Any, kind: type, *also: Any) -> Any:
    if type(value) is not kind and value not in also:
        raise ValueError(f"{name} is {shown(value)}")
    return value

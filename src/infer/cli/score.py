"""`infer score`: how likely a model finds a text, token by token."""

import functools
import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli.common import DEFAULT_MODEL, JsonOption, Loading, ModelOption, loading_options
from infer.cli.generate import read_prompt
from infer.cli.streams import counted, on_stdout

if TYPE_CHECKING:
    from infer.engine.result import Score


@functools.partial(loading_options, split=True)
def score(
    text: Annotated[
        str | None, typer.Argument(help="The text; standard input if there is none, or -.", show_default=False)
    ] = None,
    *,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    loading: Loading,
) -> None:
    """Print the log-probability of each token of a text, and their total."""
    from infer import LLM, ModelConfig, Tokenizer

    text = read_prompt(text, what="text")
    tokenizer, config = Tokenizer(model), ModelConfig.from_pretrained(model)
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError("the text is too short: a token is scored by what comes before it, so two are needed")
    if len(ids) > config.max_position_embeddings:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and the model's context {config.max_position_embeddings:,}: "
            "`infer perplexity` reads longer ones in windows"
        )
    with LLM(loading.load(model), tokenizer) as llm:
        found = llm.score(ids)
    if as_json:
        print(json.dumps({"model": model, **as_dict(found)}))
        return
    for line in lines(found):
        print(line)


def as_dict(found: "Score") -> dict[str, object]:
    tokens = [
        {"id": token, "text": text, "logprob": None if given is None else given.logprob}
        for token, text, given in zip(found.token_ids, found.texts, found.logprobs, strict=True)
    ]
    return {"tokens": tokens, "total": found.total, "perplexity": found.perplexity}


def lines(found: "Score") -> list[str]:
    texts = [json.dumps(text, ensure_ascii=False) for text in found.texts]
    width = max(map(len, texts))
    told = [f"{'token':<{width}}   log-probability   probability"]
    for text, given in zip(texts, found.logprobs, strict=True):
        row = f"{on_stdout(text):<{width}}"
        told.append(row if given is None else f"{row} {given.logprob:>17.4f} {math.exp(given.logprob):>13.2%}")
    told.append(f"{'total':<{width}} {found.total:>17.4f}")
    told.append(f"perplexity {found.perplexity:.3f} over {counted(found.scored, 'token')}")
    return told

"""Does company change a text? `python benchmarks/exactness.py --server infer=http://127.0.0.1:8000 ...`

Sends the same requests to OpenAI-compatible servers that run already, first one at a time, then many at once, and
counts the tokens that differ. A server is judged by its own texts only. With `--at-once 1` the second time is like the
first: differences then have another cause than company.

    infer serve smollm2-135m --quantize int4 --port 8000
    llama-server -m SmolLM2-135M-Instruct.Q4_1.gguf -np 8 -c 8192 --port 8001
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TOPICS = (
    *("the sea", "a clock", "the first bridge", "bread", "a lighthouse", "the moon", "an old map", "rain"),
    *("a violin", "winter", "the market", "a letter", "the desert", "a garden", "the library", "iron"),
)
OPENINGS = (
    "The most surprising fact about {} is",
    "Long ago, before anybody had written about {}, people believed that",
)
SAME, DIFFERENT = "#dbe9f6", "#d55e00"


class Comparison(NamedTuple):
    """The tokens of each request, alone and in company."""

    name: str
    alone: list[list[str]]
    together: list[list[str]]

    @property
    def differing(self) -> list[list[bool]]:
        """For each position of each request; a missing token differs."""
        rows = []
        for one, other in zip(self.alone, self.together, strict=True):
            length = max(len(one), len(other))
            rows.append([one[i : i + 1] != other[i : i + 1] for i in range(length)])
        return rows

    def row(self) -> dict[str, Any]:
        differing = self.differing
        tokens = sum(map(len, differing))
        return {
            "server": self.name,
            "texts": len(differing),
            "texts_differ": sum(map(any, differing)),
            "tokens": tokens,
            "tokens_differ": sum(map(sum, differing)),
        }


def main(arguments: Sequence[str] | None = None) -> list[Comparison]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL", help="may be repeated")
    parser.add_argument("--requests", type=int, default=32, help="number of requests [32]")
    parser.add_argument("--at-once", type=int, default=8, help="requests that are sent together [8]")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer [64]")
    parser.add_argument("--temperature", type=float, default=0.0, help="request i has the seed i [0: greedy]")
    parser.add_argument("--plot", type=Path, help="draw the tokens into this PNG file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    servers = dict(server.split("=", 1) for server in args.server if "=" in server)
    if len(servers) < len(args.server):
        parser.error("--server needs a NAME=URL, each with a name of its own")
    if min(args.requests, args.at_once, args.max_tokens) < 1:
        parser.error("--requests, --at-once and --max-tokens must be at least 1")
    bodies = [body_of(i, args.max_tokens, args.temperature) for i in range(args.requests)]
    found = []
    for name, url in servers.items():
        alone = [tokens_of(url, body) for body in bodies]
        with ThreadPoolExecutor(args.at_once) as threads:
            together = list(threads.map(lambda body, url=url: tokens_of(url, body), bodies))
        found.append(Comparison(name, alone, together))
    rows = [each.row() for each in found]
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(
                "{server}: {texts_differ} of {texts} texts and {tokens_differ} of {tokens} tokens differ".format(**row)
            )
    if args.plot is not None:
        plot(found, args.plot, args.at_once)
    return found


def body_of(i: int, max_tokens: int, temperature: float) -> dict[str, Any]:
    """Some 350 tokens; each prompt begins with a number of its own, so that none has the cached prefix of another."""
    notes = " ".join(
        f"On day {7 * k % 31} the keeper noted {topic} and wrote two lines." for k, topic in enumerate(TOPICS)
    )
    opening = OPENINGS[i // len(TOPICS) % len(OPENINGS)].format(TOPICS[i % len(TOPICS)])
    prompt = f"Book {i + 1}. {notes} {opening}"
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": i, "logprobs": 1}


def tokens_of(url: str, body: dict[str, Any]) -> list[str]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    if "tokens" in logprobs:
        return list(logprobs["tokens"])
    return [each["token"] for each in logprobs["content"]]  # as for chats: llama.cpp


def plot(found: Sequence[Comparison], path: Path, at_once: int) -> None:
    """A square for each token."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    figure, panels = plt.subplots(1, len(found), figsize=(5.2 * len(found), 3.9), layout="constrained", squeeze=False)
    for axes, each in zip(panels[0], found, strict=True):
        row = each.row()
        longest = max(map(len, each.differing))
        grid = [[float(cell) for cell in cells] + [float("nan")] * (longest - len(cells)) for cells in each.differing]
        axes.pcolormesh(grid, cmap=ListedColormap([SAME, DIFFERENT]), vmin=0, vmax=1, edgecolors="white", linewidth=0.4)
        axes.invert_yaxis()
        axes.set_title(
            f"{each.name}: {row['texts_differ']} of {row['texts']} texts,\n"
            f"{row['tokens_differ']:,} of {row['tokens']:,} tokens differ",
            fontsize=11,
        )
        axes.set_xlabel("token")
        axes.spines[:].set_visible(False)
    panels[0][0].set_ylabel("request")
    figure.suptitle(f"The same request alone, and {at_once} at once: orange where the token differs", fontsize=12)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()

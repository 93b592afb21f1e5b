"""Why keys and values can be cached: causal attention over six tokens of three numbers, with and without a cache.

    python examples/kv_cache_proof.py

The part without a cache is written out in plain torch; the part with one uses the cache that `infer` generates with.
"""

import torch
from torch import Tensor

from infer import GrowingCache

INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
chance = torch.Generator().manual_seed(123)
W_KEY, W_QUERY, W_VALUE = (torch.rand(3, 3, generator=chance) for _ in range(3))
SCALE = 3**-0.5  # 1 / sqrt(head_dim)
NEW_TOKENS = torch.rand(4, 3, generator=chance.manual_seed(123))  # a model would choose them; here they are just rows


def calculate_context_vector(
    inputs: Tensor, key_embeddings: Tensor, query_embeddings: Tensor, value_embeddings: Tensor
) -> Tensor:
    """Causal attention from scratch: everything is computed for every row of inputs [n, 3]."""
    keys, queries, values = inputs @ key_embeddings, inputs @ query_embeddings, inputs @ value_embeddings
    future = torch.ones(len(inputs), len(inputs)).triu(diagonal=1).bool()
    scores = (queries @ keys.T).masked_fill(future, -torch.inf)
    return torch.softmax(scores * SCALE, dim=1) @ values


def prefill(
    cache: GrowingCache, inputs: Tensor, key_embeddings: Tensor, query_embeddings: Tensor, value_embeddings: Tensor
) -> Tensor:
    """The same for the new rows inputs [n, 3] alone: their keys and values join those that the cache holds."""
    weights = (query_embeddings, key_embeddings, value_embeddings)
    query, key, value = ((inputs @ w).view(1, 1, -1, 3) for w in weights)  # [batch, heads, n, head_dim]
    context = cache.attend(0, query, key, value, scale=SCALE)
    cache.advance(len(inputs))
    return context.view(-1, 3)


def decode(
    cache: GrowingCache, key_embeddings: Tensor, value_embeddings: Tensor, query_embeddings: Tensor, new_tokens: Tensor
) -> Tensor:
    """Row by row: each is a prefill of one token."""
    rows = []
    for i in range(len(new_tokens)):
        new_token = new_tokens[i : i + 1]
        print("new_token", new_token)
        rows.append(prefill(cache, new_token, key_embeddings, query_embeddings, value_embeddings))
        print("context_vec", rows[-1])
    return torch.cat(rows)


def shapes(cache: GrowingCache) -> str:
    return f"keys shape: {cache.k[0][0, 0].shape} values shape {cache.v[0][0, 0].shape}"


def without_cache() -> None:
    print("1. Six tokens: each row is one token's context vector.\n")
    context = calculate_context_vector(INPUTS, W_KEY, W_QUERY, W_VALUE)
    print(context)

    print("\n2. A seventh token comes. Everything is computed again, and the first six rows come out as before.\n")
    longer = torch.cat([INPUTS, NEW_TOKENS[:1]])
    longer_context = calculate_context_vector(longer, W_KEY, W_QUERY, W_VALUE)
    print(longer, longer_context, torch.allclose(context, longer_context[:-1]), sep="\n")
    print("\n   Row i of causal attention sees rows 0..i only: the mask hides what comes after it, so a row that is")
    print("   appended after it cannot change it. Six of the seven rows were computed for nothing.")

    print("\n3. The last row alone needs one query, but the keys and values of all seven tokens.\n")
    keys, values = longer @ W_KEY, longer @ W_VALUE
    row = torch.softmax(longer[-1:] @ W_QUERY @ keys.T * SCALE, dim=-1) @ values
    print(row, torch.allclose(longer_context[-1], row), sep="\n")

    print("\n4. Of those keys and values, the first six were there before.\n")
    print(torch.allclose(keys[:-1], INPUTS @ W_KEY), torch.allclose(values[:-1], INPUTS @ W_VALUE), sep="\n")
    print("\n   A product with W acts on each row by itself: K_new = [X; x_new] W = [X W; x_new W] = [K; x_new W].")
    print("   K with one row appended, and V likewise. So keep them: that is the KV cache.")


def with_cache() -> None:
    print("\n5. Prefill: the six tokens go through once, and their keys and values stay in the cache.\n")
    print("new_tokens", NEW_TOKENS)
    kv_cache = GrowingCache.allocate(
        num_layers=1, num_kv_heads=1, head_dim=3, max_seq_len=10, dtype="float32", device="cpu"
    )
    prefill(kv_cache, INPUTS, W_KEY, W_QUERY, W_VALUE)
    print("Prefill complete. Cached", shapes(kv_cache))

    print("\n6. Decode: one row goes in; one query, one key and one value are computed; the rest is in the cache.\n")
    context = decode(kv_cache, W_KEY, W_VALUE, W_QUERY, NEW_TOKENS)
    print("Final kv cache", shapes(kv_cache))

    print("\n7. All ten tokens from scratch, and the four rows that the cache gave: the same.\n")
    expected = calculate_context_vector(torch.cat([INPUTS, NEW_TOKENS]), W_KEY, W_QUERY, W_VALUE)[6:]
    print(expected, context, torch.allclose(context, expected), sep="\n")
    print("\n   Six rows and then four more, one by one: 6 + 7 + 8 + 9 + 10 = 40 rows from scratch, 10 with the cache.")


def main() -> None:
    without_cache()
    with_cache()


if __name__ == "__main__":
    main()

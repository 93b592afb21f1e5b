"""What a memory recalls has the bits of what would be computed, after eviction, a restart, or the death of a writer."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import amount
from mocks import STORED
from tiny import FAMILIES, make_tiny_model
from torch import Tensor

from infer import KVCache
from infer.backend import Row, backend_for
from infer.backend.fingerprint import fingerprint
from infer.cache import NoCache, PagedCache
from infer.cache.pool import pages_for
from infer.cache.prefix import FEW
from infer.engine import memory as memory_module
from infer.engine.memory import MIN_STORED_PAGES, CacheMemory
from infer.engine.store import PrefixStore, page_keys, write
from infer.models.common import Decoder
from infer.models.rows import ALL

CONTEXT = 60
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}
PROMPT = random.Random(0).choices(range(64), k=CONTEXT)


def memory_of(model: Decoder, dtype: str = "float32", page: int = 4, pages: int = 200, **options: Any) -> CacheMemory:
    """pages: as many as so many pages of all layers hold."""
    cache_dtype = "int8" if dtype == "int8" else "auto"
    one = CacheMemory(model, 10**6, cache_dtype=cache_dtype, page_size=page)
    size = one.pool.page_bytes * len(one.index.windows) * pages
    return CacheMemory(model, size, cache_dtype=cache_dtype, page_size=page, **options)


def run(model: Decoder, cache: Any, tokens: list[int]) -> Tensor:
    """The logits of all of them [n, V]."""
    with torch.inference_mode():
        assert backend_for(model).name == "cpu"
        return backend_for(model).run([Row(cache, tokens, ALL)])[0][0]


def afresh(model: Decoder, tokens: list[int], dtype: str = "float32") -> Tensor:
    """Without a cache, unless that rounds."""
    if dtype == "int8":
        return run(model, KVCache.from_model_config(model.config, len(tokens), dtype="int8", device="cpu"), tokens)
    return run(model, NoCache(), tokens)


def ask(memory: CacheMemory, prompt: list[int], keep: bool = True, cache: PagedCache | None = None) -> int:
    """Feed a prompt as a request does; the logits are those of a fresh run. Returns how much was recalled."""
    assert isinstance(memory.model, Decoder)
    cache = memory.cache(CONTEXT) if cache is None else cache
    found = memory.attach_prefix(cache, prompt)
    assert found == cache.seq_len < len(prompt)
    logits = run(memory.model, cache, prompt[found:])
    dtype = "int8" if cache.quantized else "float32"
    assert torch.equal(logits, afresh(memory.model, prompt, dtype)[found:])
    if keep:
        memory.keep(cache)
    memory.index.check()
    return found


def used_pages(memory: CacheMemory) -> int:
    return memory.pool.num_pages - memory.pool.num_free_pages


class TestRecall:
    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("page", amount([1, 3, 4, 64], [3, 64]))
    def test_bits(self, family: str, dtype: str, page: int) -> None:
        """Whatever is known of a prompt: its logits, and those of what follows, are the same."""
        memory = memory_of(make_tiny_model(model_type=family), dtype, page, pages=60)
        assert ask(memory, PROMPT[:20]) == 0
        assert ask(memory, PROMPT[:20]) == 19  # one is needed for logits
        assert ask(memory, PROMPT[:30]) == 20
        assert ask(memory, PROMPT[:41]) == 30
        for common in (*range(1, 41, amount(1, 7)), 40):
            other = [*PROMPT[:common], *(63 - token for token in PROMPT[common : common + 5])]
            found = common - common % page if common % page < page // FEW else common
            assert ask(memory, other, keep=False) >= (found if family != "gemma3" else 0)

    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("page", [1, 4])
    def test_any_length(self, length: int, page: int) -> None:
        memory = memory_of(make_tiny_model(), page=page)
        ask(memory, PROMPT[:length])
        assert ask(memory, PROMPT[:length]) == length - 1
        assert ask(memory, PROMPT[: length + 1]) == length

    def test_what_the_cache_holds_is_kept(self) -> None:
        memory = memory_of(make_tiny_model())
        cache = memory.cache(CONTEXT)
        ask(memory, PROMPT[:20], keep=False, cache=cache)
        pages = cache.page_table.copy()
        assert ask(memory, [*PROMPT[:12], 5, 6], keep=False, cache=cache) == 12
        assert (cache.page_table[0, 0, :3] == pages[0, 0, :3]).all()
        assert ask(memory, PROMPT[:20]) == 0

    def test_what_others_have_is_more(self) -> None:
        memory = memory_of(make_tiny_model())
        ask(memory, PROMPT[:30])
        cache = memory.cache(CONTEXT)
        ask(memory, [*PROMPT[:10], 5, 6], keep=False, cache=cache)
        assert ask(memory, PROMPT[:35], cache=cache) == 30
        del cache
        assert used_pages(memory) == memory.index.num_pages

    def test_nothing_of_another_model(self) -> None:
        """A cache that another model has filled is not kept."""
        one, other = make_tiny_model(), make_tiny_model(1)
        memory = memory_of(one)
        cache = memory.cache(CONTEXT)
        run(other, cache, PROMPT[:9])
        memory.keep(cache)
        assert len(memory.index) == 0
        cache.reset()
        assert ask(memory, PROMPT[:9], cache=cache) == 0

    def test_filled_by_hand(self) -> None:
        memory = memory_of(make_tiny_model())
        cache = memory.cache(CONTEXT)
        cache.advance(5)
        memory.keep(cache)
        assert len(memory.index) == 0

    def test_kept_while_it_goes_on(self) -> None:
        """What is kept is not written to: a cache that goes on copies its last page first."""
        memory = memory_of(make_tiny_model())
        cache = memory.cache(CONTEXT)
        for end in range(3, 40, 5):
            ask(memory, PROMPT[:end], cache=cache)
            cache.truncate(end - 2)
            run(memory.model, cache, [1])  # type: ignore[arg-type]
            assert ask(memory, PROMPT[: end + 1], keep=False) == end

    def test_longer_than_the_cache(self) -> None:
        """As much as it holds, or nothing; no page is lost."""
        memory = memory_of(make_tiny_model())
        ask(memory, PROMPT[:30])
        cache = memory.cache(20)
        try:
            found = memory.attach_prefix(cache, PROMPT[:30])
            assert found == cache.seq_len <= 20
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
        del cache
        memory.index.clear()
        assert used_pages(memory) == 0


class TestWindows:
    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("page", [1, 3, 4, 16])
    def test_a_hit_where_two_part(self, dtype: str, page: int) -> None:
        """Though the first has gone on far beyond, and let go of the window's pages there."""
        memory = memory_of(make_tiny_model(**WINDOWS), dtype, page)
        model = memory.model
        assert isinstance(model, Decoder)
        cache = memory.cache(CONTEXT)
        memory.attach_prefix(cache, PROMPT)
        for token in PROMPT[:50]:
            run(model, cache, [token])
        memory.keep(cache)
        for common in (12, 20, 33, 48):
            found = ask(memory, [*PROMPT[:common], 1, 2, 3], keep=False)
            assert found == common or (common + 6 > 48 and found >= common - page)

    def test_a_shared_prefix(self) -> None:
        """Two that part; the pages of the second and third window are their own."""
        memory = memory_of(make_tiny_model(**WINDOWS), page=4)
        for number in range(5):
            prompt = [*PROMPT[:21], *range(number, number + 20)]
            assert ask(memory, prompt) == (21 if number else 0)

    @pytest.mark.parametrize("page", [1, 4])
    def test_under_pressure(self, page: int) -> None:
        """What is let go of first is what no hit is likely to need."""
        memory = memory_of(make_tiny_model(**WINDOWS), page=page, pages=64 // page)
        ask(memory, PROMPT[:40])
        memory.index.evict(memory.pool.num_pages // 8)
        assert ask(memory, PROMPT[:40], keep=False) == 39
        assert ask(memory, [*PROMPT[:40], 1, 2], keep=False) == 40


class TestEviction:
    @pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["full", "windows"])
    @pytest.mark.parametrize("dtype", STORED)
    @pytest.mark.parametrize("page", [1, 3, 16])
    def test_computed_again(self, changes: dict[str, Any], dtype: str, page: int) -> None:
        memory = memory_of(make_tiny_model(**changes), dtype, page, pages=-(-CONTEXT // page) + 2)
        draw = random.Random(1)
        texts = [[draw.randrange(64) for _ in range(30)] for _ in range(6)]
        assert [ask(memory, text) for text in texts] == [0] * 6
        assert ask(memory, texts[0], keep=False) < 29
        assert ask(memory, texts[5]) == 29
        assert used_pages(memory) == memory.index.num_pages

    def test_a_cache_in_use_loses_nothing(self) -> None:
        memory = memory_of(make_tiny_model(), pages=16)
        cache = memory.cache(CONTEXT)
        ask(memory, PROMPT[:20], cache=cache)
        for start in range(8):
            ask(memory, [start, *PROMPT[start : start + 30]])
        assert ask(memory, PROMPT[:25], cache=cache) == 20

    def test_conversations(self) -> None:
        for changes in ({}, WINDOWS):
            model = make_tiny_model(**changes)
            memory = memory_of(model, pages=50)
            count = memory.max_sequences(40)
            assert count == memory.pool.num_pages // pages_for(model.config, 40, 4) > 1
            caches = [memory.cache(40) for _ in range(count)]
            for number, cache in enumerate(caches):
                for at in range(40):
                    run(model, cache, [(number + at) % 64])


class TestSize:
    def test_as_much_as_it_is_given(self) -> None:
        model = make_tiny_model()
        assert CacheMemory(model, 10**6, page_size=4).pool.memory_bytes <= 10**6
        with pytest.raises(ValueError, match="1,000 bytes of cache are too few: 64 positions"):
            CacheMemory(model, 1000)
        with pytest.raises(ValueError, match="cache_dtype must be one of"):
            CacheMemory(model, 10**6, cache_dtype="int4")

    def test_half_of_what_is_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_module, "available_memory", lambda device, processes=1, **_: 10**6)
        assert 4 * 10**5 < CacheMemory(make_tiny_model()).pool.memory_bytes <= 5 * 10**5
        monkeypatch.setattr(memory_module, "available_memory", lambda device, processes=1, **_: None)
        with pytest.raises(ValueError, match="does not report its free memory"):
            CacheMemory(make_tiny_model())

    def test_a_cache_is_no_longer_than_the_model(self) -> None:
        assert memory_of(make_tiny_model()).cache(10**6).capacity == 256


class TestStore:
    """Pages of four positions; a prompt of four pages is worth a place."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "pages"

    @pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["full", "windows"])
    @pytest.mark.parametrize("dtype", STORED)
    def test_a_restart(self, folder: Path, changes: dict[str, Any], dtype: str) -> None:
        model = make_tiny_model(**changes)
        assert ask(memory_of(model, dtype, store=folder), PROMPT[:30]) == 0
        again = memory_of(make_tiny_model(**changes), dtype, store=str(folder))
        assert ask(again, PROMPT[:30]) == 28  # whole pages
        assert ask(again, PROMPT[:30]) == 29
        assert ask(again, [*PROMPT[:17], 1, 2, 3], keep=False) == 17
        assert used_pages(again) == again.index.num_pages
        assert [path.suffix for path in folder.iterdir()] == [".page"] * 7

    def test_a_salt_names_files_too(self, folder: Path) -> None:
        def asked(salt: str) -> int:
            memory = memory_of(make_tiny_model(), store=folder)
            cache = memory.cache(CONTEXT)
            cache.salt = salt
            return ask(memory, PROMPT[:30], cache=cache)

        assert [asked(salt) for salt in ("", "a", "b", "a", "")] == [0, 0, 0, 28, 28]

    def test_what_was_evicted_comes_back(self, folder: Path) -> None:
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        memory.index.clear()
        assert ask(memory, PROMPT[:40]) == 28

    def test_what_is_in_memory_is_not_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        loaded: list[str] = []
        load = PrefixStore.load
        monkeypatch.setattr(
            PrefixStore, "load", lambda store, key, *rest: (loaded.append(key), load(store, key, *rest))[1]
        )
        assert ask(memory, PROMPT[:30], keep=False) == 29
        assert loaded == []
        assert ask(memory, PROMPT[:40], keep=False) == 30
        assert loaded == [page_keys(memory.key, PROMPT, 4)[7]]  # the first that is not there

    def test_short_prompts_are_not_worth_it(self, folder: Path) -> None:
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[: 4 * MIN_STORED_PAGES - 1])
        assert [*folder.iterdir()] == []
        ask(memory, PROMPT[: 4 * MIN_STORED_PAGES])
        assert len([*folder.iterdir()]) == MIN_STORED_PAGES

    def test_written_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        saved: list[str] = []
        monkeypatch.setattr(PrefixStore, "save", lambda store, key, *rest: saved.append(key))
        ask(memory, PROMPT[:30])
        ask(memory_of(make_tiny_model(), store=folder), PROMPT[:31])
        assert saved == []

    @pytest.mark.parametrize(
        "other",
        [
            lambda folder: memory_of(make_tiny_model(1), store=folder),
            lambda folder: memory_of(make_tiny_model(rms_norm_eps=1e-3), store=folder),
            lambda folder: memory_of(make_tiny_model(**WINDOWS), store=folder),
            lambda folder: memory_of(make_tiny_model(), "int8", store=folder),
            lambda folder: memory_of(make_tiny_model(), page=2, store=folder),
            lambda folder: memory_of(make_tiny_model(), page=8, store=folder),
        ],
        ids=["weights", "config", "windows", "int8", "small pages", "large pages"],
    )
    def test_another_model(self, folder: Path, other: Callable[[Path], CacheMemory]) -> None:
        """Finds nothing, and takes nothing away."""
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        assert ask(other(folder), PROMPT[:30]) == 0
        memory.index.clear()
        assert ask(memory, PROMPT[:30]) == 28

    def test_a_few_other_weights(self, folder: Path) -> None:
        """As a model has that was trained a little further, or whose embedding of one token was set."""
        ask(memory_of(make_tiny_model(), store=folder), PROMPT[:30])
        other = make_tiny_model()
        other.layers[0].self_attn.qkv_proj.weight.data[1, 1:16] += 5
        assert ask(memory_of(other, store=folder), PROMPT[:30]) == 0

    def test_exchanged_rows(self, folder: Path) -> None:
        """The same numbers in another order: sums of all, of each second and of each third are equal."""
        ask(memory_of(make_tiny_model(), store=folder), PROMPT[:30])
        other = make_tiny_model()
        one = PROMPT[0]
        two = (one + 6) % 60
        weight = other.embed_tokens.weight.data
        weight[[one, two], 1:] = weight[[two, one], 1:]
        assert ask(memory_of(other, store=folder), PROMPT[:30]) == 0

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model.layers[0].self_attn, "scale", 0.5),
            lambda model: model.layers[0].register_forward_hook(lambda *_: None),
            lambda model: setattr(model.layers[0].mlp, "activation", "gelu"),
        ],
        ids=["a constant", "a hook", "an activation"],
    )
    def test_the_name_of_a_changed_model(self, change: Callable[[Decoder], Any]) -> None:
        model = make_tiny_model()
        before = fingerprint(model)
        assert before == fingerprint(make_tiny_model())
        change(model)
        assert fingerprint(model) != before

    @pytest.mark.parametrize(
        ("where", "other"),
        [
            ("infer.backend.fingerprint.version", lambda: "another"),
            ("infer.backend.fingerprint._source", lambda: "another"),
            ("torch.__version__", "another"),
            ("numba.__version__", "another"),
            ("torch.backends.cpu.get_cpu_capability", lambda: "another"),
            ("numba.core.codegen.CPUCodegen.magic_tuple", lambda _: ("x86_64", "another", "+avx512f")),
        ],
    )
    def test_what_changes_bits(self, where: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Is part of the name, as docs/exactness.md says."""
        model = make_tiny_model()
        before = fingerprint(model)
        monkeypatch.setattr(where, other)
        assert fingerprint(model) != before

    def test_swapped_contents(self, folder: Path) -> None:
        """Both are whole, and each other's: refused, and written anew."""
        model = make_tiny_model()
        ask(memory_of(model, store=folder), PROMPT[:30])
        one, two = (folder / f"{key}.page" for key in page_keys(memory_of(model).key, PROMPT[:28], 4)[2:4])
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        store = PrefixStore(folder)
        assert not store.has(one.stem, 1)
        assert ask(memory_of(model, store=folder), PROMPT[:30]) == 8
        assert ask(memory_of(model, store=folder), PROMPT[:30]) == 28

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
    @pytest.mark.parametrize("kind", ["fifo", "socket", "link"])
    def test_no_regular_file(self, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Skipped, not opened: it would block. It stays."""
        model = make_tiny_model()
        ask(memory_of(model, store=folder), PROMPT[:30])
        path = folder / f"{page_keys(memory_of(model).key, PROMPT[:28], 4)[3]}.page"
        path.unlink()
        if kind == "socket":
            monkeypatch.chdir(folder)  # addresses are short
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path.name)
        else:
            os.mkfifo(path if kind == "fifo" else folder / "fifo")
        if kind == "link":
            path.symlink_to(folder / "fifo")
        memory = memory_of(model, store=folder)
        assert ask(memory, PROMPT[:30]) == 12
        assert memory.store is not None
        assert not memory.store.has(path.stem, 1)
        assert os.path.lexists(path)

    def test_bounded(self, folder: Path) -> None:
        model = make_tiny_model()
        memory = memory_of(model, store=folder)
        ask(memory, PROMPT[:16])
        size = max(path.stat().st_size for path in folder.iterdir())
        store = PrefixStore(folder, most=size * 20)
        memory = memory_of(model, store=store)
        for start in range(12):
            ask(memory, [start, *PROMPT[start : start + 20]])
            assert sum(path.stat().st_size for path in folder.iterdir()) <= store.most
        assert len([*folder.iterdir()]) >= 15

    def test_least_recently_used_go_first(self, folder: Path) -> None:
        pages = torch.zeros(1, 2, 2, 2, 4, 8)
        store = PrefixStore(folder)
        for number in range(6):
            store.save(f"{number:032x}", [0], pages + number)
            os.utime(folder / f"{number:032x}.page", (1000 + number, 1000 + number))
        store.touch([f"{0:032x}"])
        found = store.load(f"{0:032x}", pages.shape[1:], torch.float32)
        assert found is not None
        assert (found[0], found[1].max().item()) == ([0], 0)
        small = PrefixStore(folder, most=store._size)
        small.save(f"{9:032x}", [0], pages + 9)
        left = {int(path.stem, 16) for path in folder.iterdir()}
        assert {0, 9} <= left  # used, and written, last
        assert left - {0, 9} == {*range(6 - len(left) + 2, 6)}
        assert small._size == sum(path.stat().st_size for path in folder.iterdir()) <= small.most
        assert not small.has(f"{1:032x}", 1)

    def test_damaged(self, folder: Path) -> None:
        """Ignored, taken away, and written anew."""
        model = make_tiny_model()
        ask(memory_of(model, store=folder), PROMPT[:30])
        keys = page_keys(memory_of(model).key, PROMPT[:28], 4)
        whole = (folder / f"{keys[3]}.page").read_bytes()
        damages: list[bytes] = [
            b"",
            b"nonsense",
            whole[:-1],
            whole[: len(whole) // 2],
            whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
            (folder / f"{keys[2]}.page").read_bytes()[:50],
        ]
        for damage in damages:
            (folder / f"{keys[3]}.page").write_bytes(damage)
            memory = memory_of(model, store=folder)
            assert ask(memory, PROMPT[:30], keep=False) == 12
            assert not (folder / f"{keys[3]}.page").exists()
            assert used_pages(memory) == memory.index.num_pages
            ask(memory, PROMPT[:30])
            assert ask(memory_of(model, store=folder), PROMPT[:30]) == 28

    @pytest.mark.parametrize(
        ("header", "change"),
        [
            ({"groups": "[1]"}, lambda t: t),  # a group that is not there
            ({"groups": "[-1]"}, lambda t: t),
            ({"groups": "[0, 0]"}, lambda t: torch.cat((t, t))),
            ({"groups": "[0, 1]"}, lambda t: t),
            ({"groups": "[]"}, lambda t: t[:0]),
            ({"groups": "0"}, lambda t: t),
            ({"groups": "[true]"}, lambda t: t),
            ({"groups": '["0"]'}, lambda t: t),
            ({"groups": "{"}, lambda t: t),
            ({"groups": "[" * 100_000}, lambda t: t),
            ({}, lambda t: t),
            ({"groups": "[0]"}, lambda t: t[0]),
            ({"groups": "[0]"}, lambda t: t.half()),
            ({"groups": "[0]"}, lambda t: t[..., :-1].contiguous()),
        ],
    )
    def test_foreign(self, folder: Path, header: dict[str, str], change: Callable[[Tensor], Tensor]) -> None:
        """Files that are whole, but no pages of this model."""
        model = make_tiny_model()
        memory = memory_of(model, store=folder)
        ask(memory, PROMPT[:30])
        key = page_keys(memory.key, PROMPT[:28], 4)[3]
        assert memory.store is not None
        found = memory.store.load(key, memory.pool.page_shape, torch.float32)
        assert found is not None
        write(folder / f"{key}.page", "page", {"pages": change(found[1])}, {"key": key} | header)
        again = memory_of(model, store=folder)
        assert ask(again, PROMPT[:30], keep=False) == 12
        assert used_pages(again) == again.index.num_pages

    def test_others_files(self, folder: Path) -> None:
        """Files that are none of its own stay, and leftovers of a writer that was killed go when they are old."""
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        (folder / "sub").mkdir()
        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        key = page_keys(memory.key, PROMPT[:28], 4)[0]
        young, old = folder / f".{key}.page.young.part", folder / f".{key}.page.old.part"
        for part in (young, old):
            part.write_bytes(b"half")
        os.utime(old, (time.time() - 10**5,) * 2)
        again = memory_of(make_tiny_model(), store=folder)
        assert ask(again, PROMPT[:30]) == 28
        (folder / f"{key}.page").unlink()
        ask(memory, PROMPT[:30])
        assert (young.exists(), old.exists()) == (True, False)
        assert (folder / "notes.txt").read_text() == "mine"

    def test_no_room_in_memory(self, folder: Path) -> None:
        """As many pages as there is room for are brought back."""
        model = make_tiny_model()
        ask(memory_of(model, store=folder), PROMPT[:50])
        memory = memory_of(model, pages=8, store=folder)
        assert 0 < memory.attach_prefix(memory.cache(CONTEXT), PROMPT[:50]) <= 32
        assert used_pages(memory) == memory.index.num_pages

    def test_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is kept there, and nobody is told: it can be computed."""
        memory = memory_of(make_tiny_model(), store=folder)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        ask(memory, PROMPT[:30])
        assert [*folder.iterdir()] == []

    def test_unwritable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "file"
        file.write_text("")
        monkeypatch.setattr(os, "access", lambda path, how: Path(path) != tmp_path)  # root may write anywhere
        for folder in (file, file / "below", tmp_path):
            with pytest.raises(ValueError, match="cannot be a prefix store: ") as error:
                memory_of(make_tiny_model(), store=folder)
            assert "\n" not in str(error.value)
            assert str(folder) in str(error.value)

    def test_gone_between_two_looks(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process has taken a page away while it was being opened: torch says so in its own way."""

        def gone(path: Path, framework: str) -> None:
            raise RuntimeError(f"unable to open file <{path}>")

        memory = memory_of(make_tiny_model(), store=folder)
        ask(memory, PROMPT[:30])
        again = memory_of(memory.model, store=folder)
        monkeypatch.setattr("infer.engine.store.safe_open", gone)
        assert ask(again, PROMPT[:30]) == 0

    def test_two_processes(self, folder: Path) -> None:
        assert python(TOGETHER, str(folder), amount("40", "15")) == "alike\n"

    def test_killed(self, folder: Path) -> None:
        """At any moment, while it writes pages: each is there whole, or not at all."""
        assert python(KILLED, str(folder), str(amount(200, 25))) == "never broken\n"


def python(script: str, *arguments: str) -> str:
    """What a script prints, in a process of its own."""
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]), "INFER_KERNELS": "0"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# One process forks those that write: importing torch takes longer than they live. A forked one cannot run kernels.
TOGETHER = """
import os, random, sys
import torch
torch.set_num_threads(1)
from test_cache_memory import PROMPT, make_tiny_model, memory_of
from infer.engine.store import PrefixStore

model = make_tiny_model()
reference = memory_of(model)

def talk(seed):
    draw = random.Random(seed)
    for turn in range(int(sys.argv[2])):
        memory = memory_of(model, store=PrefixStore(sys.argv[1], most=40_000))  # some of the pages: files come and go
        start = draw.randrange(6)
        prompt = [start, *PROMPT[start : start + draw.randrange(16, 40)]]
        cache = memory.cache(60)
        memory.attach_prefix(cache, prompt)
        with torch.inference_mode():
            model(torch.tensor([prompt[cache.seq_len :]]), kv_cache=cache)
            memory.keep(cache)
            whole = reference.cache(60)
            model(torch.tensor([prompt]), kv_cache=whole)
        assert cache.seq_len == whole.seq_len == len(prompt)
        for one, other in zip(cache.filled_pages()[:-1], whole.filled_pages()[:-1]):
            found, expected = memory.pool.read(one), reference.pool.read(other)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        memory.index.check()

children = []
for seed in range(3):
    child = os.fork()
    if not child:
        try:
            talk(seed)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
print("alike")
"""

KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import test_cache_memory  # which brings all in
from infer.engine.store import PrefixStore

folder, times = sys.argv[1], int(sys.argv[2])
shape = (2, 2, 2, 16, 8)
keys = [f"{number:032x}" for number in range(8)]

def contents(number, version):
    return torch.full((1, *shape), float(number)) + version / 1024

found = parts = 0
for turn in range(times):
    begun, begin = os.pipe()
    child = os.fork()
    if not child:
        store = PrefixStore(folder)
        store.save(keys[0], [0], contents(0, turn))
        os.write(begin, b"!")
        while True:
            for number, key in enumerate(keys):
                store.save(key, [0], contents(number, turn))
    os.read(begun, 1)  # on a busy machine that may take a while
    os.close(begun)
    os.close(begin)
    time.sleep(random.Random(turn).uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    store = PrefixStore(folder)
    for number, key in enumerate(keys):
        page = store.load(key, shape, torch.float32)
        if page is not None:
            found += 1
            version = (page[1].flatten()[0].item() - number) * 1024
            assert version in range(turn + 1), version
            assert torch.equal(page[1], contents(number, version))
    left = set(os.listdir(folder))
    assert {name for name in before if name.endswith(".page")} <= left  # none was broken, and so taken away
    parts += sum(name.endswith(".part") for name in left)
assert found
print("never broken")
"""

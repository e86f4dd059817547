"""Rows of media on several processes: a gather moves numbers, and each process gets what its packs read."""

import pytest
import ranks
import tiny
import torch
from torch import nn

import rft_fn as rft
from rft_fn import dist, packing, tree
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Media

pytestmark = pytest.mark.slow

WORLD, PROMPTS, SAMPLES = 3, 4, 2


def prompts(rank):
    """Media of a rank's prompts, of several types; the last rank has text only."""
    parts = []
    for i in range(PROMPTS):
        number = 10 * rank + i
        image = torch.full((1 + i, 5), float(number))
        sizes = torch.tensor([[number, i]])
        seen = torch.tensor([number % 2 == 0, True])
        parts.append({"pixels": image.to(torch.bfloat16), "grid": sizes, "seen": seen})
    parts[2] = None
    if rank == WORLD - 1:
        parts = [None] * PROMPTS
    return parts


def batch(rank):
    exp = tiny.experience(rank, rows=PROMPTS * SAMPLES)
    return tree.replace(exp, media=Media.of_prompts(prompts(rank), n=SAMPLES))


def read(pack):
    """(row, its media) of each sequence of a pack that is in a row."""
    found = {name: x.split(pack.media.count(name).tolist()) for name, x in pack.media.sequences().items()}
    return {row: {name: x[k] for name, x in found.items()} for k, row in enumerate(pack.rows)}


def size(media):
    return sum(x.numel() * x.element_size() for x in media.tensors.values())


class Eye(nn.Module):
    """Log-probs that are the mean of the pixels that a sequence reads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, pack):
        readers = torch.repeat_interleave(torch.arange(pack.num_seqs), pack.media.count("pixels"))
        pixels = pack.media.sequences()["pixels"].float().mean(-1)
        seen = torch.zeros(pack.num_seqs).index_add(0, readers, pixels)
        return rft.TokenOut(logp=-seen[pack.seq] * self.scale.mean() * pack.mask)


def on_a_rank(rank):
    st = get_strategy(StrategyConfig(fsdp=True))
    exp = st.gather(batch(rank))
    own = exp.media
    packs = st.shard(exp, 60)
    plans = packing.shards.cut(exp, 60, st.world)
    needed = packing.owners(exp, plans[rank])
    fetched = dist.fetch_media(own, needed)
    apply, params = st.bind(Eye())
    logp = st.score(apply, params, exp, 60).logp

    # an owner that nobody has
    nowhere = tree.replace(own, held=torch.zeros_like(own.held))
    try:
        dist.fetch_media(nowhere, needed)
        error = ""
    except ValueError as e:
        error = str(e)
    out = {
        "held": own.held.tolist(),
        "of": own.of.tolist(),
        "sizes": (size(own), size(fetched), [size(b.media) for b in packs]),
        "stored": [x.untyped_storage().nbytes() for b in packs for x in b.media.tensors.values()],
        "fetched": (fetched.held.nonzero().flatten().tolist(), needed),
        "read": [read(b) for b in packs],
        "plans": plans,
        "logp": logp,
        "mask": exp.mask,
        "error": error,
    }
    st.close()
    return out


@pytest.fixture(scope="module")
def found():
    return ranks.run(WORLD, "test_media_travel:on_a_rank")


ALL = [part for rank in range(WORLD) for part in prompts(rank)]  # of all ranks' prompts


def test_a_gather_moves_numbers_and_leaves_rows_where_they_are(found):
    owners = [r for r in range(WORLD) for part in prompts(r) if part]
    want, k = [], 0
    for part in ALL:
        want += [k if part else -1] * SAMPLES
        k += part is not None
    for rank, out in enumerate(found):
        assert out["held"] == [r == rank for r in owners] and out["of"] == want
        assert out["plans"] == found[0]["plans"]
        mine = [part for part in prompts(rank) if part]
        assert out["sizes"][0] == sum(x.numel() * x.element_size() for p in mine for x in p.values())


def test_a_process_has_the_rows_that_its_packs_read_and_no_others(found):
    whole = sum(x.numel() * x.element_size() for part in ALL if part for x in part.values())
    for out in found:
        _, fetched, packs = out["sizes"]
        assert out["fetched"][0] == out["fetched"][1] and sum(packs) >= fetched
        assert sum(out["stored"]) == sum(packs) < whole  # not views of more
        for pack in out["read"]:
            for row, media in pack.items():
                part = ALL[row // SAMPLES] or {}
                for name, x in media.items():
                    assert torch.equal(x, part.get(name, x[:0])) and x.dtype == ALL[0][name].dtype


def test_every_row_is_scored_with_its_own_media(found):
    for out in found:
        for row, logp in enumerate(out["logp"]):
            pixels = (ALL[row // SAMPLES] or {"pixels": torch.zeros(1, 5)})["pixels"].float()
            want = torch.where(out["mask"][row], -pixels.mean(-1).sum(), 0)
            torch.testing.assert_close(logp, want)


def test_rows_that_no_process_has_are_an_error_everywhere(found):
    for out in found:
        assert "media: expected a process that holds each owner, got none for" in out["error"]

"""The post-mortem of gradients that are not finite, of a model that sees."""

import pytest
import ranks
import sees_and_hears
import torch

import rft_fn as rft
from rft_fn import optim, packing
from rft_fn.strategy import StrategyConfig, get_strategy, load_fault

pytestmark = pytest.mark.slow

ROWS = [[], ["image"], [], [], [], ["image", "image"]]


def batch(bad):
    """A row whose advantage is no number."""
    exp = sees_and_hears.batch(sees_and_hears.FAMILIES["Qwen2VL"], ROWS, seed=4)
    exp.adv[bad] = exp.adv[bad] * torch.nan
    return exp


def fault(rank, folder, bad):
    """The message of the update that stops a run."""
    st = get_strategy(StrategyConfig(max_skips=1))
    st.session.set_dump_dir(folder)
    apply, state = st.init(sees_and_hears.FAMILIES["Qwen2VL"].build(), optim.adamw(1e-3))
    grads, _ = st.grad(state, apply, lambda out, b: -b.adv * out.logp, st.shard(batch(bad), 60))
    try:
        st.update(state, grads)
    except rft.strategy.NonFinite as error:
        return str(error)
    finally:
        st.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bad", [3, 5])
def test_a_row_is_found_and_kept_with_its_own_media(tmp_path, world, bad):
    """A row of text, whose pack has borrowed, is kept without what it borrowed."""
    if world == 1:
        messages = [fault(0, str(tmp_path), bad)]
    else:
        messages = ranks.run(world, "test_media_faults:fault", str(tmp_path), bad)
    assert all("the first sequence with such a gradient is in" in x for x in messages)
    pack, _, about = load_fault(tmp_path / "fault_00000001")
    want = packing.drop_borrowed(packing.pack(batch(bad), [bad]))
    assert about["row"] == bad and torch.equal(pack.tokens, want.tokens) and pack.num_seqs == 1
    assert (pack.media is None) == (not ROWS[bad])
    if pack.media is not None:
        for name, x in want.media.sequences().items():
            assert torch.equal(pack.media.sequences()[name], x)

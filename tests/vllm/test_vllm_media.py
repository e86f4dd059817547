"""What vLLM is given for a prompt with media: its own types, filled with the trainer's tensors and tokens."""

import pytest
import torch
from inprocess import needs_vllm
from sees_and_hears import FAMILIES, IMAGE, SEE, SEEN

from rft_fn.engine import requests
from rft_fn.engine.prompt_media import PromptMedia
from rft_fn.engine.vllm import sampler
from rft_fn.engine.vllm.surroundings import import_vllm

pytestmark = needs_vllm


def fields(tensors):
    """As vLLM's Qwen2-VL cuts its tensors; that module needs torchvision, which is not everywhere."""
    config = import_vllm("multimodal.inputs").MultiModalFieldConfig
    return {
        "pixel_values": config.flat_from_sizes("image", tensors["image_grid_thw"].prod(-1)),
        "image_grid_thw": config.batched("image", keep_on_cpu=True),
    }


def prompt(kinds, seed=0):
    """(model, ids, media) of Qwen2-VL."""
    family = FAMILIES["Qwen2VL"]
    tensors, ids = family.sample(kinds, seed=seed)
    return family.build(torch.float32), ids, PromptMedia(tensors or None, [False] * len(ids))


def request(kinds, seed=0, **changes):
    lm, ids, shown = prompt(kinds, seed)
    return sampler.request(lm, fields, ids, shown._replace(**changes), torch.float32), ids, shown


def test_a_family_without_a_place_for_our_names_is_refused():
    """vLLM's own classes: Qwen2-Audio maps no names."""
    with pytest.raises(
        ValueError, match=r"got Qwen2AudioFor.* no mapper for names of transformers 5; sample with"
    ):
        sampler.check_family(FAMILIES["Qwen2Audio"].build(torch.float32))
    with pytest.raises(ValueError, match="got Linear, which it does not have"):
        sampler.check_family(torch.nn.Linear(1, 1))


def test_a_family_whose_module_wants_a_missing_package_is_refused(monkeypatch):
    registry = import_vllm("model_executor.models").ModelRegistry

    class Missing:
        def load_model_cls(self):
            raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setitem(registry.models, "Qwen2VLForConditionalGeneration", Missing())
    with pytest.raises(
        ValueError, match=r"got Qwen2VLFor.* imported: No module named 'torchvision'; sample with"
    ):
        sampler.check_family(FAMILIES["Qwen2VL"].build(torch.float32))


def test_tokens_alone_stay_tokens():
    found, ids, _ = request([])
    assert found == {"prompt_token_ids": ids}


def test_each_item_has_its_rows_and_its_places():
    """Two images of different sizes: patches, grids, and ranges of nothing but placeholders."""
    found, ids, shown = request(["image", "image"], seed=3)
    assert found["type"] == "multimodal" and found["prompt_token_ids"] == ids
    items = found["mm_kwargs"]["image"]
    sizes = shown.tensors["image_grid_thw"].prod(-1).tolist()
    rows = shown.tensors["pixel_values"].float().split(sizes)
    for item, own, grid in zip(items, rows, shown.tensors["image_grid_thw"], strict=True):
        data = item.get_data()
        assert torch.equal(data["pixel_values"], own)
        assert torch.equal(data["image_grid_thw"], grid)
    taken = []
    for place, size in zip(found["mm_placeholders"]["image"], sizes, strict=True):
        assert place.is_embed is None and place.length == size // 4
        taken += range(place.offset, place.offset + place.length)
    assert taken == [t for t, token in enumerate(ids) if token == IMAGE]


def test_what_stands_between_the_places_of_an_item_is_no_place():
    """Rows of one image with an end of row between them, and images that touch."""
    lm, _, _ = prompt(["image"], seed=3)
    grid = torch.tensor([[1, 4, 4], [1, 2, 2]])
    tensors = {"image_grid_thw": grid, "pixel_values": torch.zeros(20, 96)}
    ids = [5, SEE, IMAGE, IMAGE, SEEN, IMAGE, IMAGE, IMAGE, 7]
    found = sampler.request(lm, fields, ids, PromptMedia(tensors, [False] * 9), torch.float32)
    first, second = found["mm_placeholders"]["image"]
    assert (first.offset, first.length, first.is_embed.tolist()) == (2, 5, [True, True, False, True, True])
    assert (second.offset, second.length, second.is_embed) == (7, 1, None)


def test_a_token_that_was_sampled_is_no_place():
    lm, ids, shown = prompt(["image"])
    longer = PromptMedia(shown.tensors, [*shown.sampled, True])
    found = sampler.request(lm, fields, [*ids, IMAGE], longer, torch.float32)
    (place,) = found["mm_placeholders"]["image"]
    assert place.offset + place.length <= len(ids)


def test_hashes_tell_media_apart():
    """vLLM keeps what its towers have made by them."""
    hashes = [request(["image"], seed=s)[0]["mm_hashes"]["image"] for s in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]
    lm, ids, shown = prompt(["image"], seed=1)
    other = {name: x.clone() for name, x in shown.tensors.items()}
    other["pixel_values"][0, 0] += 1e-3
    changed = sampler.request(lm, fields, ids, shown._replace(tensors=other), torch.float32)
    assert changed["mm_hashes"]["image"] != hashes[0]


def test_floats_arrive_in_the_type_of_the_weights():
    lm, ids, shown = prompt(["image"])
    found = sampler.request(lm, fields, ids, shown, torch.bfloat16)
    data = found["mm_kwargs"]["image"][0].get_data()
    assert data["pixel_values"].dtype == torch.bfloat16 and data["image_grid_thw"].dtype == torch.int64


def test_tensors_that_vllm_would_lose_are_refused():
    lm, ids, shown = prompt(["image"])
    extra = shown._replace(tensors={**shown.tensors, "pixel_attention_mask": torch.ones(1, 2)})
    with pytest.raises(requests.BadRequest, match=r"takes .*got pixel_attention_mask; sample with the hf"):
        sampler.request(lm, fields, ids, extra, torch.float32)


def test_counts_that_differ_are_refused():
    lm, ids, shown = prompt(["image"])
    with pytest.raises(requests.BadRequest, match="image placeholders for 1 items"):
        sampler.request(
            lm, fields, [*ids, IMAGE], PromptMedia(shown.tensors, [*shown.sampled, False]), torch.float32
        )

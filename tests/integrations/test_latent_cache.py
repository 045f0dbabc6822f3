"""The latent cache under transformers: what does not fit is refused, what generate() takes back is forgotten."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is missing: pip install mla_suite[hf]")

from deepseek_models import VOCAB, left_padded, make_model

from mla_suite.integrations.transformers import LatentCache, patch


def test_a_full_cache_is_refused_before_anything_is_written():
    model = make_model("v3")
    ids, _ = left_padded()
    patch(model)
    cache = LatentCache(model, 3, 8, page_size=4)
    with torch.no_grad(), pytest.raises(RuntimeError, match="11 tokens per sequence for a cache of max_len 8"):
        model(input_ids=ids, past_key_values=cache)
    assert cache.seq_lens.tolist() == [0, 0, 0]
    assert not any(layer.any() for layer in cache.paged.layers)


def test_a_full_cache_is_refused_without_asking_a_gpu():
    cache = LatentCache(make_model("v3"), 1, 8, page_size=4)
    cache.seen = SimpleNamespace(is_cuda=True)  # it has no value to read
    cache._make_room(5)
    cache._make_room(3)
    with pytest.raises(RuntimeError, match="9 tokens per sequence for a cache of max_len 8"):
        cache._make_room(1)


def test_crop_forgets_the_newest_tokens():
    model = make_model("v3")
    ids, _ = left_padded()
    patch(model)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        cache = LatentCache(model, 3, 16)
        model(input_ids=ids[:, :8], past_key_values=cache)
        model(input_ids=ids[:, :3], past_key_values=cache)
        cache.crop(-3)
        got = model(input_ids=ids[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(got, expected[:, 8:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"crop\(3\); give -3 to drop that number of tokens"):
        cache.crop(3)


def test_rejected_drafts_of_another_model_are_forgotten(monkeypatch):
    """generate() lets another model draft, and crops what this one rejects."""
    cropped = []
    crop = LatentCache.crop
    monkeypatch.setattr(LatentCache, "crop", lambda cache, count: (cropped.append(count), crop(cache, count)))
    model, drafting = make_model("v3"), make_model("v2")
    ids = left_padded()[0][:1]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB - 1}
    expected = model.generate(ids, **options)
    patch(model)
    for cache in (None, LatentCache(model, 1, 64)):
        assert torch.equal(model.generate(ids, assistant_model=drafting, past_key_values=cache, **options), expected)
    assert min(cropped) < 0


@pytest.mark.parametrize("sizes", [(0, 8, 64), (1, 0, 64), (1, 8, 0)], ids=["batch", "max_len", "page_size"])
def test_a_cache_without_room_is_refused(sizes):
    batch, max_len, page_size = sizes
    with pytest.raises(ValueError, match="LatentCache: batch .* each is 1 or more"):
        LatentCache(make_model("v3"), batch, max_len, page_size=page_size)

"""The latent cache under transformers: what does not fit is refused, what generate() takes back is forgotten."""

import warnings
from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is missing: pip install mla_suite[hf]")

from latent_models import VOCAB, left_padded, make
from transformers import DynamicCache

from mla_suite.integrations import transformers_interface
from mla_suite.integrations.transformers import LatentCache, patch, unpatch


def test_a_full_cache_is_refused_before_anything_is_written():
    model = make("deepseek_v3")
    ids, _ = left_padded()
    patch(model)
    cache = LatentCache(model, 2, 8, page_size=4)
    with torch.no_grad(), pytest.raises(RuntimeError, match="9 tokens per sequence for a cache of max_len 8"):
        model(input_ids=ids, past_key_values=cache)
    assert cache.seq_lens.tolist() == [0, 0]
    assert not any(layer.any() for layer in cache.store.latents.values())


def test_a_full_cache_is_refused_without_asking_a_gpu():
    cache = LatentCache(make("deepseek_v3"), 1, 8, page_size=4)
    cache.store.seen = SimpleNamespace(is_cuda=True)  # it has no value to read
    cache.store._make_room(8)
    cache.store._columns = 8
    with pytest.raises(RuntimeError, match="9 tokens per sequence for a cache of max_len 8"):
        cache.store._make_room(1)


def test_rejected_drafts_of_another_model_are_forgotten(monkeypatch):
    """generate() lets another model draft, and crops what this one rejects."""
    cropped = []
    crop = LatentCache.crop
    monkeypatch.setattr(LatentCache, "crop", lambda cache, count: (cropped.append(count), crop(cache, count)))
    model, drafting = make("deepseek_v3"), make("deepseek_v2", num_hidden_layers=1)
    ids = left_padded()[0][:1]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB - 1}
    expected = model.generate(ids, **options)
    patch(model)
    for cache in (None, LatentCache(model, 1, 64)):
        assert torch.equal(model.generate(ids, assistant_model=drafting, past_key_values=cache, **options), expected)
    assert min(cropped) < 0


@pytest.mark.parametrize("folder", ["deepseek_v3", "mistral4", "deepseek_v32"])
def test_a_models_first_layers_may_draft(folder):
    model = make(folder)
    layers = model.config.num_hidden_layers
    ids = left_padded()[0][:1]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    patch(model)
    for cache in (None, LatentCache(model, 1, 32)):
        made = model.generate(ids, assistant_early_exit=1, past_key_values=cache, **options)
        assert torch.equal(made, expected)
        assert model.config.num_hidden_layers == layers


@pytest.mark.parametrize("sizes", [(0, 8, 64), (1, 0, 64), (1, 8, 0)], ids=["batch", "max_len", "page_size"])
def test_a_cache_without_room_is_refused(sizes):
    batch, max_len, page_size = sizes
    with pytest.raises(ValueError, match="LatentCache: batch .* each is 1 or more"):
        LatentCache(make("deepseek_v3"), batch, max_len, page_size=page_size)


def test_compiled_steps_may_rely_on_the_address_of_every_tensor(monkeypatch):
    """Of those that take the place of others for more sequences as well; a CUDA graph would copy what may move."""
    marked = []
    monkeypatch.setattr(torch._dynamo, "mark_static_address", marked.append)
    cache = LatentCache(make("deepseek_v32"), 2, 16)
    for change in (lambda: None, lambda: cache.batch_repeat_interleave(2)):
        change()
        held = {name: value for name, value in vars(cache.store).items() if isinstance(value, torch.Tensor)}
        del held["_index"]  # of one step
        held |= {f"latents {at}": value for at, value in cache.store.latents.items()}
        held |= {f"index_keys {at}": value for at, value in cache.store.index_keys.items()}
        assert [name for name, value in held.items() if not any(value is other for other in marked)] == []


def test_tokens_to_forget_are_counted_from_the_end():
    with pytest.raises(ValueError, match=r"crop\(3\); give -3 to drop that number of tokens"):
        LatentCache(make("deepseek_v3"), 3, 16).crop(3)


@torch.no_grad()
@pytest.mark.parametrize("forgets", ["crop", "reset"])
def test_a_cache_that_has_forgotten_all_is_as_new(forgets):
    """More tokens than there are may be cropped; a mask that hid tokens before a reset is not asked for any more."""
    model = make("deepseek_v3")
    ids, mask = left_padded()
    with patch(model):
        expected = model(input_ids=ids).logits
        held = DynamicCache() if forgets == "reset" else LatentCache(model, 2, 32)
        model(input_ids=ids, past_key_values=held, attention_mask=mask if forgets == "reset" else None)
        held.reset() if forgets == "reset" else held.crop(-100)
        assert int(held.get_seq_length()) == 0
        logits_close(model(input_ids=ids, past_key_values=held).logits, expected)
        assert int(held.get_seq_length()) == ids.shape[1]


def prompt():
    torch.manual_seed(3)
    return torch.randint(3, VOCAB, (2, 9))


def logits_close(got, expected):
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_packed_sequences_and_dropout_are_refused():
    model = make("deepseek_v3", attention_dropout=0.1)
    with patch(model):
        with pytest.raises(ValueError, match="position_ids of packed sequences"):
            model(prompt(), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
        with pytest.raises(ValueError, match=r"attention_dropout 0\.1 in training"):
            model.train()(prompt())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_adapter_or_a_hook_on_kv_b_proj_is_refused_whenever_it_is_added(compiled):
    model = make("deepseek_v3")
    with torch.no_grad(), patch(model):
        step = torch.compile(model, backend="eager") if compiled else model
        cache = LatentCache(model, 2, 32)
        model(prompt(), past_key_values=cache)
        attention = model.model.layers[1].self_attn
        hook = attention.kv_b_proj.register_forward_hook(lambda module, args, output: 2 * output)
        with pytest.raises(TypeError, match="kv_b_proj of layer 1 has a hook or a forward of its own"):
            step(prompt()[:, :1], past_key_values=cache)
        hook.remove()
        torch.compiler.reset()  # compiled code never sees hooks that are added or removed later
        step(prompt()[:, :1], past_key_values=cache)
        attention.kv_b_proj = torch.nn.Sequential(attention.kv_b_proj)
        with pytest.raises(TypeError, match="kv_b_proj of layer 1 is Sequential"):
            step(prompt()[:, :1], past_key_values=cache)


def test_an_interface_that_differs_is_refused_and_a_newer_number_is_not(monkeypatch):
    model = make("deepseek_v3")
    base = type(model.model)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, kv_store=None, inputs_embeds=None):
        raise AssertionError

    with monkeypatch.context() as changed:
        changed.setattr(base, "forward", forward)
        with pytest.raises(
            TypeError, match="DeepseekV3Model of transformers .* takes its cache as none of cache, past_"
        ):
            patch(model)

    def layer_forward(self, hidden_states, rope, attention_mask, cache=None, **kwargs):
        raise AssertionError

    released = FunctionType(layer_forward.__code__, {"__name__": "transformers.models"})  # not wrapped by somebody else
    with monkeypatch.context() as changed:
        changed.setattr(type(model.model.layers[0].self_attn), "forward", released)
        with pytest.raises(TypeError, match="DeepseekV3Attention of transformers .* takes no position_embeddings"):
            patch(model)
    assert "mla_suite_patch" not in vars(model)
    expected = model(prompt()).logits
    monkeypatch.setattr(transformers_interface.transformers, "__version__", "9.1.0")
    with pytest.warns(UserWarning, match=r"transformers 9\.1\.0 is newer than .* its interface is the same"):
        patch(model)
    unpatch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model)
    logits_close(model(prompt()).logits, expected)


def test_an_attention_argument_that_nobody_knows_is_refused():
    model = make("mistral4")
    with patch(model), pytest.raises(TypeError, match="is called with picked; nobody here knows what it means"):
        model(prompt(), picked=torch.zeros(2))

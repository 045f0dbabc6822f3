"""Patched and unpatched models give equal logits over random sequences of what callers do with a cache.

The patched model may refuse a call, which ends the sequence; `pytest -m full` runs 100 sequences of each model.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is missing: pip install mla_suite[hf]")

import latent_models
from transformers import DynamicCache

from mla_suite.integrations.transformers import LatentCache, patch

HYBRID = [folder for folder, (_, fields) in latent_models.PATCHED.items() if "layer_types" in fields]
MAX_DIFFERENCE = 1e-4  # of the largest logit
# A router that leaves experts out is discontinuous: of some thousand tokens one has two scores within rounding.
EVERY_EXPERT = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}


@cache
def models(folder: str):
    """The folder's tiny model, and the same model patched."""
    both = latent_models.make(folder, **EVERY_EXPERT), latent_models.make(folder, **EVERY_EXPERT)
    patch(both[1])
    return both


class Sequence:
    """One random sequence of calls on a model and on its patched twin, with a cache of each."""

    def __init__(self, folder: str, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.folder = folder
        self.models = models(folder)
        self.batch = 1 + self.draw(3)
        config = self.models[0].config.get_text_config(decoder=True)
        if self.draw(2):
            ours = LatentCache(self.models[1], self.batch, 64 if self.draw(2) else None, page_size=4 << self.draw(3))
        else:
            ours = DynamicCache(config=config) if self.draw(2) else DynamicCache()
        # transformers' models with a layer of another kind need a cache that knows the config.
        self.caches = [DynamicCache(config=config), ours]
        self.reset()

    def draw(self, number: int) -> int:
        return int(torch.randint(number, (), generator=self.random))

    def reset(self) -> None:
        self.ids = torch.zeros(self.batch, 0, dtype=torch.long)
        self.mask = torch.zeros(self.batch, 0, dtype=torch.long)

    def run(self) -> None:
        steps = [self.forward] * 6 + [self.crop, self.forget, self.reorder, self.repeat, self.select]
        steps += [self.fail, self.generate, self.uncached, self.hide]
        for _ in range(8):
            if not steps[self.draw(len(steps))]():
                return

    def both(self, call) -> list | None:
        """Returns the results of a call for each model, or None where the patched one refuses it."""
        with torch.no_grad():
            expected = call(self.models[0], self.caches[0])
            try:
                return [expected, call(self.models[1], self.caches[1])]
            except (TypeError, ValueError, NotImplementedError) as error:
                if not str(error).startswith(("patch:", "LatentCache:")):
                    raise
                return None

    def compare(self, found: list, rows: torch.Tensor) -> None:
        expected, got = (logits.float()[rows] for logits in found)
        if rows.any():
            off = float((got - expected).abs().max() / expected.abs().max())
            assert off <= MAX_DIFFERENCE, f"{self.folder}: logits differ by {off:.3g} of the largest"

    def fresh(self, number: int) -> torch.Tensor:
        """Ids [batch, number] that a sequence has not had: an indexer may choose either of two equal tokens."""
        rows = []
        for row in self.ids.tolist():
            free = torch.tensor([id for id in range(3, latent_models.VOCAB) if id not in row])
            rows.append(free[torch.randperm(len(free), generator=self.random)[:number]])
        return torch.stack(rows)

    def new_tokens(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of new tokens, and which of them are real: padding comes first in a prompt, and anywhere elsewhere."""
        number = 1 + self.draw(most)
        ids = self.fresh(number)
        real = torch.ones(self.batch, number, dtype=torch.long)
        if not self.mask.shape[1] and self.draw(2):
            start = torch.randint(number, (self.batch, 1), generator=self.random)
            real = (torch.arange(number) >= start).long()
        elif self.mask.shape[1] and self.folder not in HYBRID and not self.draw(3):
            real = (torch.rand(real.shape, generator=self.random) > 0.2).long()
        return ids, real

    def forward(self) -> bool:
        """A prompt, a part of one, a step or several drafts, with masks of any width and positions from anywhere."""
        seen = self.mask.shape[1]
        if seen > 40:
            return False
        ids, real = self.new_tokens(6)
        mask = torch.cat((self.mask, real), 1)
        arguments = {}
        if not mask.all() or self.draw(2):
            more = torch.randint(2, (self.batch, self.draw(5)), generator=self.random)
            arguments["attention_mask"] = torch.cat((mask, more), 1)
        kind = self.draw(3)
        if kind == 1:
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, seen:]
        if kind == 2:
            arguments["position_ids"] = (torch.arange(ids.shape[1]) + seen + self.draw(20))[None]
        found = self.both(lambda model, held: model(ids, past_key_values=held, **arguments).logits)
        if found is None:
            return False
        self.compare(found, real.bool())
        self.ids, self.mask = torch.cat((self.ids, ids), 1), mask
        return self.lengths()

    def lengths(self) -> bool:
        expected, got = (int(held.get_seq_length(self.attention_layer())) for held in self.caches)
        assert got == expected == self.mask.shape[1], f"{self.folder}: lengths {expected} and {got}"
        return True

    def attention_layer(self) -> int:
        kinds = self.models[0].config.get_text_config(decoder=True)
        kinds = getattr(kinds, "layer_types", None) or ["full_attention"]
        return next((index for index, kind in enumerate(kinds) if kind != "linear_attention"), 0)

    def crop(self) -> bool:
        if self.folder in HYBRID or not self.mask.shape[1]:
            return True
        number = self.draw(self.mask.shape[1] + 1)
        if self.both(lambda _, held: held.crop(-number)) is None:
            return False
        kept = self.mask.shape[1] - number
        self.ids, self.mask = self.ids[:, :kept], self.mask[:, :kept]
        return self.lengths()

    def forget(self) -> bool:
        if self.both(lambda _, held: held.reset()) is None:
            return False
        self.reset()
        return True

    def reorder(self) -> bool:
        order = torch.randint(self.batch, (self.batch,), generator=self.random)
        return self.change_batch(lambda _, held: held.reorder_cache(order), order)

    def repeat(self) -> bool:
        if self.folder in HYBRID or self.batch > 3:  # transformers' linear layers cannot be repeated
            return True
        order = torch.arange(self.batch).repeat_interleave(2)
        return self.change_batch(lambda _, held: held.batch_repeat_interleave(2), order)

    def select(self) -> bool:
        if self.folder in HYBRID:
            return True
        order = torch.randperm(self.batch, generator=self.random)[: 1 + self.draw(self.batch)]
        return self.change_batch(lambda _, held: held.batch_select_indices(order), order)

    def change_batch(self, call, order: torch.Tensor) -> bool:
        if not self.mask.shape[1]:
            return True
        if self.both(call) is None:
            return False
        self.ids, self.mask, self.batch = self.ids[order], self.mask[order], len(order)
        return True

    def fail(self) -> bool:
        """An error in the last layer of the patched model: its cache is as it was before."""
        ids = self.fresh(2)
        base = self.models[1].get_decoder()

        def error(*_):
            raise ZeroDivisionError

        hook = base.layers[-1].register_forward_pre_hook(error)
        mask = torch.cat((self.mask, self.mask.new_ones(self.batch, 2)), 1)
        try:
            with torch.no_grad(), pytest.raises(ZeroDivisionError):
                self.models[1](ids, attention_mask=mask, past_key_values=self.caches[1])
        finally:
            hook.remove()
        return self.lengths() if self.mask.shape[1] else True

    def generate(self) -> bool:
        """Greedy tokens after all that is cached and a few new ones, or after a prompt of their own."""
        new = self.fresh(1 + self.draw(4))
        # The padding token's embedding is zero, so an indexer scores all keys alike for it.
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "suppress_tokens": [0]}
        options["no_repeat_ngram_size"] = 1
        continued = self.mask.shape[1] and bool(self.mask.all()) and self.folder not in HYBRID
        ids = torch.cat((self.ids, new), 1) if continued else new
        if not continued:
            options["num_beams"] = 1 + (self.draw(3) == 0 and self.folder not in HYBRID)
        options["attention_mask"] = torch.ones_like(ids)

        def call(model, held):
            given = {"past_key_values": held} if continued else {}
            return model.generate(ids, **given, **options)

        found = self.both(call)
        if found is None:
            return False
        assert torch.equal(*found), f"{self.folder}: generate gives {found[1].tolist()}, not {found[0].tolist()}"
        if not continued:
            return True
        self.ids = found[0][:, :-1]
        self.mask = torch.ones_like(self.ids)
        return self.lengths()

    def uncached(self) -> bool:
        """A forward without a cache, which transformers gives no mask wider than its tokens."""
        held_ids, held_mask = self.ids, self.mask
        self.ids, self.mask = held_ids[:, :0], held_mask[:, :0]
        ids, real = self.new_tokens(6)
        self.ids, self.mask = held_ids, held_mask
        given = {} if real.all() and self.draw(2) else {"attention_mask": real}
        found = self.both(lambda model, _: model(ids, use_cache=False, **given).logits)
        if found is not None:
            self.compare(found, real.bool())
        return found is not None

    def hide(self) -> bool:
        """A mask that hides a token which is cached: it is refused, or its token is hidden."""
        if self.draw(4) or not self.mask.shape[1] or self.folder in HYBRID:
            return True
        ids = self.fresh(1)
        mask = torch.cat((self.mask, self.mask.new_ones(self.batch, 1)), 1)
        mask[0, self.draw(self.mask.shape[1])] ^= 1
        found = self.both(lambda model, held: model(ids, attention_mask=mask, past_key_values=held).logits)
        assert found is None, "a token that was cached is hidden"
        return False


@pytest.mark.parametrize("sequences", [4, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("folder", latent_models.PATCHED)
def test_random_calls_give_the_unpatched_models_logits(folder, sequences, seeded):
    for number in range(sequences):
        Sequence(folder, seeded + number).run()

"""Hugging Face DeepSeek V2 and V3 models on our attention and paged latent cache.

    model = DeepseekV3ForCausalLM.from_pretrained(...)
    patch(model)                                        # undo with unpatch(model), or use it as a context manager
    cache = LatentCache(model, batch=4, max_len=4096)
    model.generate(**inputs, past_key_values=cache)     # without one, a cache that grows is made for you

Only attention changes: parameters stay the model's own, under their names. Prefill is un-absorbed, every step of one
token is absorbed decode over the latent cache. Padding (attention_mask 0) is never cached, so ragged batches cost their
real tokens. What a mask hides must be hidden when the token arrives; tokens already cached stay visible.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from mla_suite.models.cache import PagedLatentCache, Step, slots
from mla_suite.models.config import MLAConfig, Yarn
from mla_suite.models.mla import MLA

ATTENTION_NAME = "mla_suite"
LAYOUTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def config_of(config: Any) -> MLAConfig:
    """The MLAConfig of a DeepseekV2Config or DeepseekV3Config."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"patch: rope_type {kind!r}; default and yarn are possible: leave this model as it is")
    yarn = None
    if kind == "yarn":
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        yarn = Yarn(
            factor=rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"],
            original_max_position=rope["original_max_position_embeddings"],
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            mscale=rope["mscale"] if both else 1.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        )
    return MLAConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        num_layers=config.num_hidden_layers,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_position=config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        yarn=yarn,
        rope_interleaved=getattr(config, "rope_interleave", True),  # V2 has no such field and always pairs neighbours
        projection_bias=config.attention_bias,
    )


class LatentCache(Cache):
    """The paged latent cache in the place of a transformers cache, for a fixed batch.

    With `max_len`, pages for `batch` sequences of that many tokens are taken at once and nothing moves afterwards, so
    a compiled decode step runs at any length. Without it the cache grows as it fills, in eager mode only.
    Beam search is refused; `crop` and `reset` work.
    """

    def __init__(self, model: nn.Module, batch: int, max_len: int | None = None, *, page_size: int = 64) -> None:
        dtype, device = cast(torch.dtype, model.dtype), cast(torch.device, model.device)
        self.growable = max_len is None
        width = 1 if max_len is None else -(-max_len // page_size)
        layers = cast(Any, model.config).num_hidden_layers
        self.paged = PagedLatentCache(layers, batch * width, page_size, layout=layout_of(dtype), device=device)
        self.sequences = [self.paged.allocate(width * page_size) for _ in range(batch)]
        self.block_table = self._table()
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.has_prefix = False
        super().__init__(layers=[_CacheLayer(batch, not self.growable) for _ in range(layers)])
        for tensor in (*self.paged.layers, self.block_table, self.seq_lens, self.seen):
            torch._dynamo.mark_static_address(tensor)

    @property
    def max_len(self) -> int:
        """Tokens per sequence that fit as the cache stands."""
        return self.block_table.shape[1] * self.paged.page_size

    def begin(self, batch: int, q_len: int, valid: torch.Tensor | None) -> Step:
        """Make room for q_len tokens per sequence, those that `valid` [batch, q_len] marks, and say where they go.

        Positions count the rows of `cos_sin` that the model's own rotary_emb makes for this call.
        """
        if batch != self.block_table.shape[0]:
            raise ValueError(
                f"LatentCache: a batch of {batch} for a cache of {self.block_table.shape[0]} sequences; make the cache "
                "with the batch that is decoded"
            )
        if not torch.compiler.is_compiling():
            self._make_room(q_len)
        start = self.seq_lens.long()[:, None]
        if valid is None:
            index = start + torch.arange(q_len, device=self.seq_lens.device)
            slot_mapping = slots(self.block_table, index, self.paged.page_size)
            self.seq_lens.add_(q_len)
        else:
            # Padding looks up token 0, which every sequence has room for, and is then skipped.
            index = torch.where(valid, start + valid.cumsum(1) - 1, 0)
            slot_mapping = torch.where(valid, slots(self.block_table, index, self.paged.page_size), -1)
            self.seq_lens.add_(valid.sum(1, dtype=torch.int32))
        self.seen.add_(q_len)
        positions = torch.arange(batch * q_len, device=self.seq_lens.device)
        return Step(self.block_table, self.seq_lens, slot_mapping.flatten(), positions)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens seen so far, padding included, as a tensor: no step waits for it."""
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.max_len, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.growable else self.max_len

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `tokens_to_remove` tokens, as after a rejected draft: as many of every sequence."""
        self.seq_lens.sub_(tokens_to_remove).clamp_(min=0)
        self.seen.sub_(tokens_to_remove).clamp_(min=0)

    def reset(self) -> None:
        self.seq_lens.zero_()
        self.seen.zero_()
        self.has_prefix = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse_beams()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_beams()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._refuse_beams()

    def _refuse_beams(self) -> NoReturn:
        raise NotImplementedError("LatentCache: a beam search copies sequences, this cache does not; use num_beams=1")

    def _make_room(self, q_len: int) -> None:
        if self.seen.is_cuda and not self.growable:
            return  # a fixed cache never waits for the device; its gather checks the bound there
        needed = int(self.seen) + q_len
        if needed <= self.max_len:
            return
        if not self.growable:
            raise RuntimeError(
                f"LatentCache: {needed} tokens per sequence for a cache of max_len {self.max_len}; make it longer"
            )
        width = max(-(-needed // self.paged.page_size), 2 * self.block_table.shape[1])
        self.paged.grow(len(self.sequences) * (width - self.block_table.shape[1]))
        for sequence in self.sequences:
            self.paged.reserve(sequence, width * self.paged.page_size)
        self.block_table = self._table()

    def _table(self) -> torch.Tensor:
        rows = [self.paged.pool.pages(sequence) for sequence in self.sequences]
        return torch.tensor(rows, dtype=torch.int32).to(self.paged.device)


class _CacheLayer(CacheLayerMixin):
    """One layer as transformers counts them; what it asks of a layer is answered by `LatentCache`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: int, compileable: bool) -> None:
        super().__init__()
        self.batch_size = batch
        self.is_compileable = compileable
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._refuse()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._refuse()

    def get_mask_sizes(self, query_length: int) -> Any:
        self._refuse()

    def get_seq_length(self) -> Any:
        self._refuse()

    def get_max_length(self) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("LatentCache: a layer holds no keys and values of its own; call patch(model) before using it")


class _Call(NamedTuple):
    """What one forward of the model hands to each of its attention layers."""

    cache: LatentCache | None
    step: Step | None
    valid: torch.Tensor | None
    prefix: bool


class LatentAttention(MLA):
    """`MLA` with the parameters and the call signature of a transformers DeepSeek attention."""

    def __init__(self, original: nn.Module, config: MLAConfig) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.layout = layout_of(cast(nn.Linear, original.kv_b_proj).weight.dtype)
        self.layer_idx = cast(int, original.layer_idx)
        for name, module in original.named_children():
            setattr(self, name, module)
        self.train(original.training)

    def forward(  # type: ignore[override]  # the signature is that of the module it stands in for
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        mla_suite_call: _Call | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if mla_suite_call is None:
            raise TypeError("patch: a patched attention was called outside its model; call the model that was patched")
        cache, step, valid, prefix = mla_suite_call
        batch, q_len = hidden_states.shape[:2]
        cos_sin = _cos_sin(position_embeddings, batch)
        if cache is None or step is None:
            positions = torch.arange(batch * q_len, device=hidden_states.device)
            return self.prefill(hidden_states, cos_sin, positions=positions, valid=valid), None
        kv_cache = cache.paged.layers[self.layer_idx]
        if q_len == 1:
            return self.decode(hidden_states, kv_cache, step, cos_sin), None
        return self.prefill(hidden_states, cos_sin, kv_cache, step, valid=valid, prefix=prefix), None


def _cos_sin(position_embeddings: Any, batch: int) -> torch.Tensor:
    """fp32 [batch x q_len, 64] from V3's (cos, sin), whose halves repeat, or V2's complex numbers."""
    if isinstance(position_embeddings, tuple):
        cos, sin = (t[..., : t.shape[-1] // 2] for t in position_embeddings)
    else:
        cos, sin = torch.view_as_real(position_embeddings).unbind(-1)
    rows = torch.cat((cos, sin), dim=-1).float()
    return rows.expand(batch, -1, -1).reshape(-1, rows.shape[-1])


def layout_of(dtype: torch.dtype) -> str:
    """The cache layout that stores latents in the model's own dtype."""
    if dtype not in LAYOUTS:
        raise TypeError(
            f"patch: a model in {dtype}; possible are bfloat16, float16 and float32: convert it with model.to"
        )
    return LAYOUTS[dtype]


class Patch:
    """What `patch` did to a model; `unpatch` undoes it, and so does leaving the `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        base = cast(Any, model).model
        self._attentions = [(layer, layer.self_attn) for layer in base.layers]
        self._implementation = base.config._attn_implementation
        config = config_of(base.config)
        replacements = [LatentAttention(_checked(attention, config), config) for _, attention in self._attentions]
        for (layer, _), replacement in zip(self._attentions, replacements, strict=True):
            layer.self_attn = replacement
        base.config._attn_implementation = ATTENTION_NAME
        self._hook = base.register_forward_pre_hook(self._before, with_kwargs=True)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        unpatch(self.model)

    def restore(self) -> None:
        """Put back the original attention layers."""
        for layer, attention in self._attentions:
            layer.self_attn = attention
        cast(Any, self.model).model.config._attn_implementation = self._implementation
        self._hook.remove()

    def _before(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Runs before the decoder: one step of the cache for all layers."""
        if args:
            names = ("input_ids", "attention_mask", "position_ids", "past_key_values")
            kwargs = dict(zip(names, args, strict=False), **kwargs)
        if kwargs.get("output_attentions"):
            raise ValueError(
                "patch: output_attentions=True; attention weights are never stored: unpatch the model to see them"
            )
        given = kwargs.get("input_ids")
        shape = kwargs["inputs_embeds"].shape if given is None else given.shape
        batch, q_len = shape[0], shape[1]
        valid = _valid(kwargs.get("attention_mask"), q_len)
        use_cache = kwargs.get("use_cache")
        cache = self._cache(
            kwargs.get("past_key_values"), cast(Any, base.config).use_cache if use_cache is None else use_cache, batch
        )
        step, prefix = None, False
        if cache is not None:
            if kwargs.get("position_ids") is None:
                positions = torch.arange(q_len, device=cache.seen.device) + cache.seen
                kwargs["position_ids"] = positions[None]
            prefix = q_len > 1 and cache.has_prefix
            cache.has_prefix = True
            step = cache.begin(batch, q_len, valid)
        call = _Call(cache, step, valid, prefix)
        return (), {**kwargs, "attention_mask": None, "past_key_values": cache, "mla_suite_call": call}

    def _cache(self, given: Cache | None, use_cache: bool, batch: int) -> LatentCache | None:
        if isinstance(given, LatentCache):
            return given
        if given is None and not use_cache:
            return None
        if torch.compiler.is_compiling():
            raise TypeError("patch: a compiled step needs past_key_values=LatentCache(model, batch, max_len)")
        if given is None:
            return LatentCache(self.model, batch)
        # generate() makes an empty DynamicCache; whoever holds it may pass it again, so it keeps its latent cache.
        kept = vars(given)
        if type(given) is DynamicCache and "latent_cache" not in kept and given.get_seq_length() == 0:
            kept["latent_cache"] = LatentCache(self.model, batch)
        if "latent_cache" not in kept:
            raise TypeError(
                f"patch: past_key_values is a {type(given).__name__} with keys and values of its own; pass "
                "LatentCache(model, batch, max_len), or nothing"
            )
        return cast(LatentCache, kept["latent_cache"])


def _valid(attention_mask: torch.Tensor | None, q_len: int) -> torch.Tensor | None:
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            f"patch: attention_mask has shape {tuple(attention_mask.shape)}; give [batch, tokens] with 0 for padding"
        )
    return attention_mask[:, -q_len:].bool()


def _checked(attention: nn.Module, config: MLAConfig) -> nn.Module:
    """Refuse an attention layer whose computation is not the one we put in its place."""
    if type(attention) not in (v2.DeepseekV2Attention, v3.DeepseekV3Attention):
        raise TypeError(f"patch: attention is a {type(attention).__name__}; a fresh DeepSeek V2 or V3 model is needed")
    if type(attention.kv_b_proj) is not nn.Linear:
        raise TypeError(f"patch: kv_b_proj is a {type(attention.kv_b_proj).__name__}; absorption needs a plain Linear")
    if abs(cast(float, attention.scaling) - config.softmax_scale) > 1e-6 * config.softmax_scale:
        raise ValueError(
            f"patch: the model scales scores by {attention.scaling}, its config says {config.softmax_scale}: "
            "make the two agree"
        )
    return attention


def patch(model: nn.Module) -> Patch:
    """Put `LatentAttention` under a DeepseekV2ForCausalLM or DeepseekV3ForCausalLM, in place.

    Raises TypeError or ValueError, before anything changes, for a model that it does not know or that is patched.
    """
    if not isinstance(model, (v2.DeepseekV2ForCausalLM, v3.DeepseekV3ForCausalLM)):
        raise TypeError(
            f"patch: a {type(model).__name__}; possible are DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: load one"
        )
    if "mla_suite_patch" in vars(model):
        raise ValueError("patch: this model is patched already; call unpatch(model) first")
    applied = Patch(model)
    vars(model)["mla_suite_patch"] = applied
    return applied


def unpatch(model: nn.Module) -> None:
    """Give the model its own attention back."""
    if "mla_suite_patch" not in vars(model):
        raise ValueError("unpatch: this model is not patched; nothing to undo")
    vars(model).pop("mla_suite_patch").restore()


def _keep_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Masks stay [batch, tokens]; the patched model reads padding from them and nothing else."""
    return attention_mask


def _no_attention(*_: Any, **__: Any) -> None:
    raise TypeError("attention implementation 'mla_suite' is not a function of q, k and v; call patch(model)")


AttentionMaskInterface.register(ATTENTION_NAME, _keep_mask)
AttentionInterface.register(ATTENTION_NAME, _no_attention)

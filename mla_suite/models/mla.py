"""Multi-head latent attention as a module: projections, norms and rope in torch, attention through the operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import mla_suite
from mla_suite import kv_formats
from mla_suite.core import checks
from mla_suite.models import prefill
from mla_suite.models.absorb import ABSORBABLE, absorbed, head_values, not_absorbable
from mla_suite.models.cache import Step, check_sequences
from mla_suite.models.config import MLAConfig
from mla_suite.models.qkv_down_proj import LatentNorm, Parameters, are_views, equals_both, held, joined, latents
from mla_suite.models.rope import rotate


class MLA(nn.Module):
    """One attention layer of a DeepSeek-style model, on one tensor-parallel rank.

    Parameters carry the names of DeepSeek's checkpoints (`q_a_proj`, `kv_b_proj`, ...), so their state dicts load as
    they are. `kv_format` names how `kv_cache` stores tokens. Three ways through:

    - `decode`: any number of new tokens per sequence over the cache, absorbed (W_UK into q, W_UV into the output);
    - `prefill`: new tokens among themselves, un-absorbed, and over a cached prefix by merging with lse;
    - `forward`: decode.

    With heads split over ranks the result is this rank's share of the sum that an all-reduce completes.
    Inference only: the operators refuse gradients; a prefill without a cache calls none of them and passes gradients.
    `fuse()` makes one product of the two down-projections.
    """

    down_weight: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(
        self,
        config: MLAConfig,
        *,
        kv_format: str = "bf16",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        stored = kv_formats.get_kv_format(kv_format)
        if not stored.dense and stored.head_dim != config.cached_dim:
            raise ValueError(
                f"MLA: kv_format {kv_format!r} holds rows of {stored.head_dim} values; this layer "
                f"caches rows of {config.cached_dim} values: use bf16, fp16, fp32, fp8 or fp8_fnuz"
            )
        self.config = config
        self.kv_format = kv_format

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def norm(size: int) -> nn.Module:
            return (
                LatentNorm(size, config.norm_eps, dtype=dtype, device=device) if config.latent_norms else nn.Identity()
            )

        bias, heads = config.projection_bias, config.num_heads
        if config.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, heads * config.qk_head_dim)
        else:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, bias)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, bias)
        self.register_buffer("down_weight", None, persistent=False)
        self.register_buffer("down_bias", None, persistent=False)
        self._joined: Parameters = ()  # those that `fuse` made views of the two
        self.register_load_state_dict_post_hook(_fused_again)  # with assign=True the parameters are other tensors

    def fuse(self) -> MLA:
        """Multiply x by both down-projections at once: queries' and latents', or q_proj where q has no low rank.

        Their weights become views of one matrix, under the names they had: state dicts stay as they are, and loading
        one, `.to()`, copying in place and deepcopy keep the two in step. The modules are called instead while the
        product would differ from what they do, and while gradients are recorded: see docs/model_author.md. Call this
        again after giving either another tensor; where either is no plain Linear it leaves both as they are. On a CUDA
        GPU an o_proj of many heads gets zeros as its bias, for speed; state dicts do not have them. Returns the layer.
        """
        first, second = self._down_projections()
        if type(first) is not nn.Linear or type(second) is not nn.Linear:
            self.down_weight, self.down_bias, self._joined = None, None, ()
            return self
        now, weight = held(first, second), self.down_weight
        with torch.no_grad():
            if weight is None or not are_views(now, self._joined, weight, self.down_bias):
                self.down_weight, self.down_bias = joined(first, second)
                self._joined = now
            _add_zeros(self.o_proj)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MLA:
        super()._apply(fn, recurse)  # .to(), .float() and their like give every tensor a storage of its own
        _fused_again(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # so does deepcopy
        _fused_again(self)

    def forward(self, x: torch.Tensor, kv_cache: torch.Tensor, step: Step, cos_sin: torch.Tensor) -> torch.Tensor:
        return self.decode(x, kv_cache, step, cos_sin)

    def decode(
        self,
        x: torch.Tensor,
        kv_cache: torch.Tensor,
        step: Step,
        cos_sin: torch.Tensor,
        *,
        kv_descale: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        max_seqlen_kv: int = 0,
        split_size: int = 0,
    ) -> torch.Tensor:
        """Write the new tokens' latents, then attend to everything cached.

        x [batch, q_len, hidden_size]; kv_cache as the kv_format says, written in place; `step` has batch x q_len slots
        and positions, its seq_lens include the new tokens; cos_sin fp32 [max_len, rope] from `rope.cos_sin_table`.
        Query i of q_len sees keys up to seq_lens - q_len + i. Returns [batch, q_len, hidden_size]. Traceable with
        fullgraph; lengths are read on the device only. kv_descale [] or [1] fp32 goes with an fp8 cache. `plan`,
        `max_seqlen_kv` and `split_size` go to `mla_suite.decode`.

        topk_indices int32 [batch, q_len, topk], from a sparse indexer (V3.2): slots, page x page_size + offset, that
        each query attends to instead of all keys before it; -1 selects nothing.
        """
        if topk_indices is not None and (kv_descale is not None or not self.config.cache_rotated):
            raise ValueError(
                "MLA.decode: topk_indices with kv_descale or an un-rotated cache; sparse attention reads bf16, fp16, "
                "fp32 and v32 caches with rotated keys: use one of those"
            )
        check_sequences(x, step)
        w_uk, w_uv = self._up_projections()
        q_nope, q_pe, kv_c, k_pe = self._projected(x)
        self._append(kv_c, k_pe, kv_cache, step, cos_sin, kv_descale)
        q = absorbed(q_nope, q_pe, w_uk, cos_sin, step.positions, interleaved=self.config.rope_interleaved)
        scale = self.config.softmax_scale
        head_dim_v = self.config.kv_lora_rank
        if topk_indices is None:
            out, _ = mla_suite.decode(
                q,
                kv_cache,
                step.seq_lens,
                step.block_table,
                kv_descale=kv_descale,
                rope_cos_sin=self._unrotated(cos_sin),
                plan=plan,
                softmax_scale=scale,
                max_seqlen_q=x.shape[1],
                max_seqlen_kv=max_seqlen_kv,
                head_dim_v=head_dim_v,
                kv_format=self.kv_format,
                split_size=split_size,
            )
        else:
            out, _ = mla_suite.sparse_decode(
                q,
                [kv_cache],
                [topk_indices],
                plan=plan,
                kv_formats=[self.kv_format],
                softmax_scale=scale,
                head_dim_v=head_dim_v,
                split_size=split_size,
            )
        return self.o_proj(head_values(out, w_uv).flatten(-2))

    def prefill(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor | None = None,
        step: Step | None = None,
        *,
        positions: torch.Tensor | None = None,
        q_lens: Sequence[int] | None = None,
        valid: torch.Tensor | None = None,
        prefix: bool = False,
        kv_descale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend among new tokens without absorption, and write their latents if there is a cache.

        x is [tokens, hidden_size] with `q_lens`, the host's list of tokens per sequence as appended, or [batch, tokens,
        hidden_size] with `valid` (bool [batch, tokens]) marking real tokens where the batch is padded on the left.
        `prefix` says that some sequence already has cached tokens; they are attended to absorbed, through
        `mla_suite.decode`, and merged by lse. Without `step` (no cache) `positions` [batch, tokens] or [tokens] are
        needed. New tokens see each other unquantised whatever the kv_format. cos_sin and kv_descale are as in `decode`.
        Returns x's shape.
        """
        prefill.check(x, kv_cache, step, positions, q_lens, valid, prefix)
        if kv_cache is not None:
            self._absorbable_kv_b_proj()  # which prefill calls, and decode steps over this cache do not
        reads_values = x.is_cpu or checks.debugging()
        if reads_values and checks.readable(x) and kv_cache is not None and step is not None and q_lens is not None:
            prefill.check_order(q_lens, step, kv_cache.shape[1])
        where = step.positions if step is not None else positions
        assert where is not None
        rows = cos_sin[where].view(*x.shape[:-1], cos_sin.shape[-1])
        q_nope, q_pe, kv_c, k_pe = self._projected(x)
        q_pe = rotate(q_pe, rows[..., None, :], interleaved=self.config.rope_interleaved)
        rotated_k_pe = rotate(k_pe, rows, interleaved=self.config.rope_interleaved)
        if kv_cache is not None and step is not None:
            self._append(kv_c, k_pe, kv_cache, step, cos_sin, kv_descale)
        q = torch.cat((q_nope, q_pe), dim=-1)
        k, v = self._expanded(kv_c, rotated_k_pe)
        scale = self.config.softmax_scale
        if not prefix:
            out = prefill.causal_attention(q, k, v, softmax_scale=scale, valid=valid, q_lens=q_lens)
        else:
            assert kv_cache is not None
            assert step is not None
            own = prefill.causal_attention_with_lse(q, k, v, softmax_scale=scale, valid=valid, q_lens=q_lens)
            past = self._attend_prefix(q_nope, q_pe, kv_cache, step, cos_sin, q_lens, valid, kv_descale)
            out = prefill.merged(own, past, x.dtype)
        return self.o_proj(out.flatten(-2))

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, tp_rank: int = 0, tp_size: int = 1) -> None:
        """Copy a full layer's weights (names as in a DeepSeek checkpoint, no prefix), as rank tp_rank of tp_size; fuse.

        The o_proj bias, if any, goes to rank 0 alone, so that the ranks' sum has it once.
        """
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"load_weights: tp_rank {tp_rank} of {tp_size}; ranks are 0 to {tp_size - 1}")
        own = dict(self.named_parameters())
        if set(own) != set(weights):
            raise ValueError(
                f"load_weights: missing {sorted(set(own) - set(weights))}, not part of this layer "
                f"{sorted(set(weights) - set(own))}; give exactly the layer's tensors, dequantised"
            )
        share = {name: _rank_share(name, tensor, tp_rank, tp_size) for name, tensor in weights.items()}
        for name, parameter in own.items():
            if share[name].shape != parameter.shape:
                raise ValueError(
                    f"load_weights: {name} of rank {tp_rank} of {tp_size} has shape {tuple(share[name].shape)}, this "
                    f"layer takes {tuple(parameter.shape)}: build it with the full config's for_rank({tp_size})"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(share[name])
        self.fuse()

    def _down_projections(self) -> tuple[nn.Linear, nn.Linear]:
        """The two products of x: what queries are made of, and the latents with k_pe."""
        first = self.q_proj if self.config.q_lora_rank is None else self.q_a_proj
        return first, self.kv_a_proj_with_mqa

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_nope and q_pe [..., heads, dim], kv_c [..., latent] normalised, k_pe [..., rope]; no pe is rotated yet."""
        c = self.config
        q_norm = None if c.q_lora_rank is None else self.q_a_layernorm
        first, second = self._down_projections()
        sizes = [c.kv_lora_rank, c.qk_rope_head_dim]
        weight, bias = self.down_weight, self.down_bias
        if weight is not None and equals_both(x, first, second, self._joined, weight, bias):
            sizes = [first.out_features, *sizes]
            q, kv_c, k_pe = latents(x, weight, bias, q_norm, self.kv_a_layernorm, sizes)
        else:
            kv_c, k_pe = second(x).split(sizes, dim=-1)
            q, kv_c = first(x) if q_norm is None else q_norm(first(x)), self.kv_a_layernorm(kv_c)
        if c.q_lora_rank is not None:
            q = self.q_b_proj(q)
        heads = q.view(*x.shape[:-1], c.num_heads, c.qk_head_dim)
        q_nope, q_pe = heads.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return q_nope, q_pe, kv_c, k_pe

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views W_UK [heads, qk_nope_head_dim, latent] and W_UV [heads, v_head_dim, latent] of kv_b_proj."""
        c = self.config
        weight = self._absorbable_kv_b_proj().weight
        weight = weight.view(c.num_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_uk, w_uv = weight.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        return w_uk, w_uv

    def _absorbable_kv_b_proj(self) -> nn.Linear:
        """kv_b_proj; TypeError where the module is more than its weight, such as with an adapter or a hook."""
        found = self.kv_b_proj
        given = not_absorbable(found)
        if given is not None:
            raise TypeError(f"MLA: kv_b_proj {given}; {ABSORBABLE}")
        return found

    def _expanded(self, kv_c: torch.Tensor, rotated_k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        up = self.kv_b_proj(kv_c).view(*kv_c.shape[:-1], c.num_heads, c.qk_nope_head_dim + c.v_head_dim)
        k_nope, v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        shared = rotated_k_pe[..., None, :].expand(*k_nope.shape[:-1], c.qk_rope_head_dim)
        return torch.cat((k_nope, shared), dim=-1), v

    def _append(
        self,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        step: Step,
        cos_sin: torch.Tensor,
        kv_descale: torch.Tensor | None,
    ) -> None:
        rotated = self.config.cache_rotated and k_pe.shape[-1] > 0
        mla_suite.append_kv(
            kv_c.flatten(0, -2),
            k_pe.flatten(0, -2).to(kv_c.dtype),  # under autocast the norm of kv_c returns fp32
            kv_cache,
            step.slot_mapping,
            kv_descale,
            cos_sin if rotated else None,
            step.positions if rotated else None,
            kv_format=self.kv_format,
            interleaved=self.config.rope_interleaved,
        )

    def _unrotated(self, cos_sin: torch.Tensor) -> torch.Tensor | None:
        """What decode rotates cached rope parts with, which it does of un-rotated caches."""
        return None if self.config.cache_rotated or self.config.qk_rope_head_dim == 0 else cos_sin

    def _attend_prefix(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        step: Step,
        cos_sin: torch.Tensor,
        q_lens: Sequence[int] | None,
        valid: torch.Tensor | None,
        kv_descale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [..., heads, v_head_dim] and lse [..., heads] of tokens cached before this call; q_pe is rotated."""
        w_uk, w_uv = self._up_projections()
        q = absorbed(q_nope, q_pe, w_uk)
        if q_lens is not None:
            new = torch.tensor(list(q_lens), dtype=torch.int32, device="cpu").to(q.device)
            cu_seqlens_q = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            longest = max(*q_lens, 1)  # where no sequence has tokens, nothing is attended to
        else:
            new = torch.full_like(step.seq_lens, q.shape[1]) if valid is None else valid.sum(1, dtype=torch.int32)
            cu_seqlens_q, longest = None, q.shape[1]
        out, lse = mla_suite.decode(
            q,
            kv_cache,
            step.seq_lens - new,
            step.block_table,
            cu_seqlens_q=cu_seqlens_q,
            kv_descale=kv_descale,
            rope_cos_sin=self._unrotated(cos_sin),
            softmax_scale=self.config.softmax_scale,
            max_seqlen_q=longest,
            head_dim_v=self.config.kv_lora_rank,
            causal=False,
            kv_format=self.kv_format,
        )
        return head_values(out, w_uv), lse


# Output rows of these are grouped by head; o_proj's input columns are.
_HEAD_ROWS = ("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")


# The smallest in_features for which a zero bias, and so cuBLASLt, is faster; with 8192 and 2048 it costs 0.2 to 0.6 us.
_LONG = 16384


def _add_zeros(linear: nn.Linear) -> None:
    """With a bias torch leaves a product to cuBLASLt, whose choice takes an H200 61 us where cuBLAS's takes 63 to 68,
    for it leaves parts of the sum to another kernel (16 to 128 rows, DeepSeek V3's o_proj)."""
    on_nvidia = linear.weight.is_cuda and torch.version.hip is None
    if on_nvidia and linear.in_features >= _LONG and not isinstance(linear.bias, nn.Parameter):
        del linear.bias
        linear.register_buffer("bias", linear.weight.new_zeros(linear.out_features), persistent=False)


def _fused_again(layer: MLA, _: Any = None) -> None:
    if layer.down_weight is not None:
        layer.fuse()


def _rank_share(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dim = 0 if name in _HEAD_ROWS else 1 if name == "o_proj.weight" else None
    if dim is not None:
        if tensor.shape[dim] % size:
            raise ValueError(f"load_weights: {name} of shape {tuple(tensor.shape)} does not split over {size} ranks")
        return tensor.chunk(size, dim)[rank]
    if name == "o_proj.bias" and rank:
        return torch.zeros_like(tensor)
    return tensor

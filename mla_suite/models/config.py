"""The numbers that define one multi-head latent attention layer, and the four models whose numbers are known."""

from __future__ import annotations

import dataclasses
import math

LATENT = 512
ROPE = 64
WIDTHS = (LATENT, ROPE), (LATENT, 0), (256, 64), (256, 32), (128, 32)
"""kv_lora_rank and qk_rope_head_dim of the cached tokens that every arch's decode takes."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling (arXiv 2309.00071) with DeepSeek's two mscale factors.

    `factor` stretches `original_max_position` positions; frequencies that turn more than `beta_fast` times over the
    original context are kept, those that turn less than `beta_slow` times are divided by `factor`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(
                f"Yarn: factor {self.factor}; a stretch is 1 or more: give the ratio of new to old context"
            )
        if self.original_max_position < 1:
            raise ValueError(
                f"Yarn: original_max_position {self.original_max_position}; give the context length of pre-training"
            )

    @property
    def table_factor(self) -> float:
        """Factor of cos and sin: mscale(factor, mscale) / mscale(factor, mscale_all_dim)."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 x mscale x ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Shape and conventions of one MLA layer on one tensor-parallel rank.

    Sizes are in elements. `num_heads` are the heads of this rank. `q_lora_rank` None means a direct query projection.
    `latent_norms` False leaves out both RMS norms. `rope_interleaved` pairs neighbours (GPT-J, DeepSeek); False pairs
    the two halves (NeoX). `cache_rotated` False keeps k_pe un-rotated in the cache, to be rotated as it is read.
    `index_topk` is the number of keys that a sparse indexer keeps (V3.2): `MLA.decode` takes its choice as
    topk_indices; the indexer is not part of the layer, and up to kv_len = index_topk attending to all keys is the same.
    Raises ValueError for sizes below 1, and for cached tokens of other widths than WIDTHS.

    >>> MLAConfig.deepseek_r1().for_rank(8).num_heads
    16
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    num_layers: int = 1
    kv_lora_rank: int = LATENT
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = ROPE
    v_head_dim: int = 128
    max_position: int = 4096
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    rope_interleaved: bool = True
    cache_rotated: bool = True
    latent_norms: bool = True
    norm_eps: float = 1e-6
    projection_bias: bool = False
    index_topk: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_layers", "qk_nope_head_dim", "v_head_dim", "max_position"):
            if getattr(self, name) < 1:
                raise ValueError(f"MLAConfig: {name} {getattr(self, name)}; it must be 1 or more")
        if (self.kv_lora_rank, self.qk_rope_head_dim) not in WIDTHS:
            possible = ", ".join(f"{latent} + {rope}" for latent, rope in WIDTHS)
            raise ValueError(
                f"MLAConfig: kv_lora_rank {self.kv_lora_rank} and qk_rope_head_dim {self.qk_rope_head_dim}; a cached "
                f"token is {possible} elements"
            )
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(
                f"MLAConfig: q_lora_rank {self.q_lora_rank}; give a positive rank, or None for no low rank"
            )
        if not self.cache_rotated and self.rope_interleaved:
            raise ValueError(
                "MLAConfig: cache_rotated=False with rope_interleaved=True; un-rotated caches are read in the half "
                "style: set rope_interleaved=False"
            )

    @property
    def cached_dim(self) -> int:
        """Values of a cached token: its latent and its rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(qk_head_dim), times mscale(factor, mscale_all_dim) squared under YaRN, as DeepSeek does."""
        mscale = yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) if self.yarn else 1.0
        return self.qk_head_dim**-0.5 * mscale * mscale

    def for_rank(self, tp_size: int) -> MLAConfig:
        """The same layer with the heads of one of `tp_size` tensor-parallel ranks."""
        if tp_size < 1 or self.num_heads % tp_size:
            raise ValueError(
                f"MLAConfig.for_rank: {self.num_heads} heads do not split over {tp_size} ranks: choose a tp_size that "
                "divides them"
            )
        return dataclasses.replace(self, num_heads=self.num_heads // tp_size)

    @classmethod
    def deepseek_r1(cls) -> MLAConfig:
        """DeepSeek V3, V3.1 and R1 (config.json of deepseek-ai/DeepSeek-R1)."""
        return cls(
            hidden_size=7168,
            num_heads=128,
            q_lora_rank=1536,
            num_layers=61,
            max_position=163840,
            yarn=Yarn(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
        )

    @classmethod
    def deepseek_v32(cls) -> MLAConfig:
        """DeepSeek V3.2: R1's layer, whose indexer keeps 2048 keys per query."""
        return dataclasses.replace(cls.deepseek_r1(), index_topk=2048)

    @classmethod
    def kimi_k2(cls) -> MLAConfig:
        """Kimi K2 (config.json of moonshotai/Kimi-K2-Instruct): R1's layer, 64 heads, theta 50000, YaRN factor 32."""
        yarn = Yarn(
            factor=32.0, original_max_position=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
        )
        r1 = cls.deepseek_r1()
        return dataclasses.replace(r1, num_heads=64, max_position=131072, rope_theta=50000.0, yarn=yarn)

    @classmethod
    def gpu_mode_2025(cls) -> MLAConfig:
        """GPU MODE's decode layer (2025): R1's sizes, no norms, halves paired, an un-rotated cache of 8192 tokens.

        Its rope table is `cos_sin_table(config, dtype=torch.bfloat16)`.
        """
        r1 = dataclasses.replace(cls.deepseek_r1(), num_layers=1, max_position=8192, yarn=None, latent_norms=False)
        return dataclasses.replace(r1, rope_interleaved=False, cache_rotated=False)

    @classmethod
    def tiny(cls) -> MLAConfig:
        """Two layers that run anywhere in milliseconds: the cached token is full size, everything else is small."""
        return cls(
            hidden_size=128,
            num_heads=8,
            q_lora_rank=64,
            num_layers=2,
            qk_nope_head_dim=32,
            v_head_dim=32,
            max_position=1024,
            yarn=Yarn(factor=4.0, original_max_position=256, mscale=1.0, mscale_all_dim=1.0),
        )


PRESETS = {
    "deepseek_r1": MLAConfig.deepseek_r1,
    "deepseek_v32": MLAConfig.deepseek_v32,
    "kimi_k2": MLAConfig.kimi_k2,
    "tiny": MLAConfig.tiny,
}

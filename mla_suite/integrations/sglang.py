"""An SGLang attention backend for MLA models on our decode. Importable only where SGLang is installed.

    from mla_suite.integrations import plugins
    plugins.sglang()                        # in every process of the server: as an entry point, see the serving guide
    # --attention-backend mla_suite --page-size 64

Everything but decode (extend, verification of drafts with a mask) is SGLang's Triton backend, from which the class is
derived. Written against SGLang's interface of 2026; not run in a server by this repository.
"""

from __future__ import annotations

from typing import Any

import torch

import mla_suite
from mla_suite.integrations.dense import KV_FORMATS

try:
    from sglang.srt.layers.attention.triton_backend import (  # type: ignore[import-not-found]  # optional
        TritonAttnBackend,
    )
except ImportError as error:
    raise ImportError(
        f"mla_suite.integrations.sglang needs SGLang with its Triton attention backend of 2026 ({error}); install "
        "sglang, or call mla_suite.decode from a backend of your own"
    ) from error


class MLASuiteAttnBackend(TritonAttnBackend):
    """Decode of an MLA model through `mla_suite.decode`.

    The first layer of a pass makes the page table, the lengths and the plan, from tensors that SGLang keeps in place
    for its CUDA graphs; so a captured step makes them anew at every replay, and no hook of SGLang's is needed.
    The table is read from SGLang's token table at every page_size-th token: with pages of one token it is as long as
    the longest sequence that fits, so serve with --page-size 64.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        if not model_runner.use_mla_backend:
            raise ValueError("MLASuiteAttnBackend: the model has no latent attention; choose another attention backend")
        super().__init__(model_runner, *args, **kwargs)
        self.page_size = int(model_runner.page_size)
        self._batch: Any = None
        self._layer = -1
        self._table = self._lens = torch.empty(0)
        self._plan: torch.Tensor | None = None

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [tokens, heads x 576], or [tokens, heads x 512] and q_rope; -> [tokens, heads x 512]."""
        if layer.logit_cap:
            raise ValueError(f"MLASuiteAttnBackend: logit_cap is {layer.logit_cap}; scores are not capped")
        pool = getattr(forward_batch, "token_to_kv_pool", None) or self.token_to_kv_pool
        if k is not None and save_kv_cache:
            if k_rope is not None:
                pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
            else:
                pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        heads, width, width_v = layer.tp_q_head_num, layer.head_dim, layer.v_head_dim
        if q_rope is not None:
            q = torch.cat((q.reshape(-1, heads, width_v), q_rope.reshape(-1, heads, width - width_v)), dim=-1)
        queries = q.reshape(-1, 1, heads, width)
        # A new pass begins with another batch, or with a layer that is not further up.
        if forward_batch is not self._batch or layer.layer_id <= self._layer:
            self._begin(forward_batch, heads)
        self._batch, self._layer = forward_batch, layer.layer_id
        cache = pool.get_key_buffer(layer.layer_id).view(-1, self.page_size, width)
        fp8 = cache.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        descale = getattr(layer, "k_scale", None) if fp8 else None
        out, _ = mla_suite.decode(
            queries,
            cache,
            self._lens,
            self._table,
            kv_descale=None if descale is None else torch.as_tensor(descale, device=cache.device).float().reshape(1),
            plan=self._plan,
            softmax_scale=layer.scaling,
            head_dim_v=width_v,
            kv_format=KV_FORMATS[cache.dtype],
            split_size=self._split_size,
        )
        return out.view(-1, heads * width_v)

    @property
    def _split_size(self) -> int:
        """Keys per split where SGLang asks for deterministic inference, which for us is batch-invariant; else 0."""
        return int(self.split_tile_size) if self.enable_deterministic and self.split_tile_size else 0

    def _begin(self, forward_batch: Any, heads: int) -> None:
        self._lens = forward_batch.seq_lens.int()
        width = self.req_to_token.shape[1]
        host_lens = getattr(forward_batch, "seq_lens_cpu", None)
        capturing = self._lens.is_cuda and torch.cuda.is_current_stream_capturing()
        if host_lens is not None and len(host_lens) and not capturing:
            width = min(width, int(torch.as_tensor(host_lens).max()))  # a captured table must serve every later length
        pages = self.req_to_token[:, : max(width, 1) : self.page_size]
        self._table = (pages[forward_batch.req_pool_indices.long()] // self.page_size).int()
        self._plan = None
        if not self._split_size:
            self._plan = mla_suite.plan(self._lens, num_heads=heads)

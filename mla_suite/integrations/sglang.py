"""An SGLang attention backend for MLA models on our decode. Importable only where SGLang is installed.

    # sglang serve --model-path <model> --attention-backend mla_suite --page-size 64

The class is derived from SGLang's Triton backend, which has all that docs/vllm_sglang.md does not give to
`mla_suite.decode`; prompts on H100 and H200 are in `sglang_prompts`, trees of drafts in `sglang_trees`.
"""

from __future__ import annotations

from typing import Any, cast

import torch

import mla_suite
from mla_suite.integrations import (
    FP8,
    KV_FORMATS,
    PRECISION,
    by_token,
    capturing,
    fp8_query_rows,
    joined_queries,
    needs,
    refuse,
    sglang_trees,
    takes_query_parts,
)
from mla_suite.integrations.interface import Interface

with needs("SGLang 0.5.20 or newer", __name__, "decode from a backend of your own"):
    from sglang import __version__
    from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general
    from sglang.kernels.ops.quantization.fp8_kernel import scaled_fp8_quant
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from mla_suite.integrations import sglang_prompts

NAME = "MLASuiteAttnBackend"
TESTED = ("0.5.20", "0.5.23")
OTHERWISE = "choose another attention backend"
CALL = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
BATCH = {
    *("forward_mode", "seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc", "extend_seq_lens"),
    *("extend_seq_lens_cpu", "spec_info"),
}
MODES = ("is_target_verify", "is_extend", "is_decode_or_idle")
READ = {
    *("req_to_token", "token_to_kv_pool", "enable_deterministic", "split_tile_size", "num_draft_tokens", "topk"),
    "num_head",
}
SHORT = 8  # new tokens per sequence: longer prompts have no plan, whose partial results grow with them
WIDE_PAGE = 64  # smaller pages make page tables so long that reading the lengths on the host is cheaper


class _Call:
    """The arguments with which SGLang calls a backend's forward methods, in its order.

    q [tokens, heads x 576], or [tokens, heads x 512] with q_rope; k and v [tokens, 1, 576], or k of 512 with k_rope.
    `options` are the keywords beyond these that are not None: sinks, score_mod, aux_tensors and what comes later.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        self.q, self.k, self.v, self.layer, self.forward_batch = q, k, v, layer, forward_batch
        self.save_kv_cache, self.q_rope, self.k_rope = save_kv_cache, q_rope, k_rope
        self.options = {name: value for name, value in options.items() if value is not None}

    def query_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q [tokens, heads, 512] and q_rope [tokens, heads, 64]."""
        layer, q_rope = self.layer, cast(torch.Tensor, self.q_rope)
        heads, width, width_v = layer.tp_q_head_num, layer.head_dim, layer.v_head_dim
        return self.q.view(-1, heads, width_v), q_rope.view(-1, heads, width - width_v)

    def joined_queries(self) -> torch.Tensor:
        """Returns q and q_rope as one tensor [tokens, heads, 576]."""
        return joined_queries(*self.query_parts(), concat_mla_absorb_q_general)


class MLASuiteAttnBackend(TritonAttnBackend):
    """Decode of an MLA model through `mla_suite.decode`.

    The first layer of a pass makes the page table, the lengths and the plan, from tensors that SGLang keeps in place
    for its CUDA graphs; so a captured step makes them anew at every replay, and no hook of SGLang's is needed.
    The table is read from SGLang's token table at every page_size-th token: with pages of one token it is as long as
    the longest sequence that fits, so serve with --page-size 64.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        interface = _check_interface()
        if not model_runner.use_mla_backend:
            refuse(NAME, "the model has no latent attention", OTHERWISE)
        super().__init__(model_runner, *args, **kwargs)
        interface.has("TritonAttnBackend", self, READ)
        if getattr(self, "dcp_size", 1) > 1:
            given = f"decode context parallelism over {self.dcp_size} ranks is not supported"
            refuse(NAME, given, f"serve with --dcp-size 1, or {OTHERWISE}")
        if getattr(getattr(self, "kv_index_translator", None), "reads_are_translated", False):
            given = "the pool stores virtual page ids, and page tables are read from the token table as physical ones"
            refuse(NAME, given, f"serve without the unified pool, or {OTHERWISE}")
        self.page_size = int(model_runner.page_size)
        # Host lengths bound the width of the page table. Without them it is as wide as the longest context, which costs
        # a few microseconds with wide pages. It costs memory with small ones, and in deterministic mode, where every
        # sequence has partial results for all splits of that width.
        self.needs_cpu_seq_lens = bool(self._split_size) or self.page_size < WIDE_PAGE
        self._batch: Any = None
        self._layer = -1
        self._max_seqlen_q = 1
        self._table = self._lens = torch.empty(0)
        self._cu_seqlens_q: torch.Tensor | None = None
        self._plan: torch.Tensor | None = None
        self._tree_mask: torch.Tensor | None = None
        self._fp8_queries = False
        dtype, width = getattr(model_runner, "kv_cache_dtype", None), self.token_to_kv_pool.kv_cache_dim
        self.prompts = sglang_prompts.over(dtype, self.req_to_token, width, self.num_head)
        self._one = torch.ones(1, dtype=torch.float32, device=self.req_to_token.device)
        # Whose masks are of drafts alone: SGLang's own extend cannot read these, and is never given them.
        self._trees = sglang_trees.drafted(model_runner, self.topk, self.num_draft_tokens)
        if self._trees == "ngram":
            sglang_trees.small_ngram_masks()
        elif self._trees == "eagle":
            self._verify_mask = sglang_trees.small_mask(0, self.num_draft_tokens, self.device)

    def init_cuda_graph_state(self, max_bs: int, *args: Any, **kwargs: Any) -> None:
        """SGLang's, with a small buffer for the masks of trees."""
        super().init_cuda_graph_state(max_bs, *args, **kwargs)
        if self._trees:
            self._verify_mask = sglang_trees.small_mask(max_bs, self.num_draft_tokens, self.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """SGLang's for prompts and drafts. Decode reads none of it, and listing the slots of every key takes time."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """As `init_forward_metadata`, before a captured step."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata_out_graph(forward_batch, *args, **kwargs)

    def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """SGLang asks before it replays a graph of prompts."""
        return self._fits_graph(forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)

    def vote_prefill_cuda_graph(self, batch: Any) -> bool:
        """The same, of a batch of its scheduler, before ranks with batches of their own agree."""
        return self._fits_graph(batch.extend_lens, batch.prefix_lens)

    def _fits_graph(self, new: Any, cached: Any) -> bool:
        if self.prompts is None or self.enable_deterministic:
            return True
        return not self.prompts.gain_expanded(new, cached, sglang_prompts.EAGER_PAIRS // self.num_head)

    def shared_read_ends(self, fm: Any) -> Any:
        """The first layer reads the token table and the lengths, so they may change only after the replay."""
        ends = super().shared_read_ends(fm)
        return max(ends, type(ends).POST_REPLAY, key=lambda end: end.value)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Arguments as in `_Call`; -> [tokens, heads x 512]."""
        call = _Call(*args, **kwargs)
        _check_softmax(call)
        return self._attend(call)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        """Verification of drafts and absorbed extends as `forward_decode`, expanded ones as `Prompts.attend`; all else
        is SGLang's."""
        call = _Call(*args, **kwargs)
        absorbed = _absorbed(call.layer, self._pool(call.forward_batch))
        if not call.options and call.k is not None and absorbed and self._is_decoded(call):
            _check_softmax(call)
            return self._attend(call)
        if self.prompts is not None and not absorbed and self.prompts.takes(call.forward_batch):
            _check_softmax(call)
            return self.prompts.attend(call)
        if self._trees and call.forward_batch.forward_mode.is_target_verify():
            given = f"verification of a tree of drafts with {', '.join(call.options) or 'keys of each head'}"
            refuse(NAME, given, f"scores are plain softmax over latents: {OTHERWISE}")
        k = call.k if call.k_rope is None else torch.cat((call.k, call.k_rope), dim=-1)
        q = call.q if call.q_rope is None else call.joined_queries().flatten(1)
        return super().forward_extend(q, k, call.v, call.layer, call.forward_batch, call.save_kv_cache, **call.options)

    def _is_decoded(self, call: _Call) -> bool:
        """Returns whether these query tokens are drafts of `tree_mask`'s kind, or extends that ours attends to."""
        forward_batch, tokens = call.forward_batch, call.q.shape[0]
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            drafts = forward_batch.spec_info
            return is_chain(drafts) or bool(self._trees and getattr(drafts, "ragged_verify_layout", None) is None)
        if self.enable_deterministic:
            return False  # bits would depend on how much of a prompt was cached, or came in the last chunk
        lens = forward_batch.extend_seq_lens_cpu
        if mode.name not in ("EXTEND", "MIXED") or lens is None or capturing(forward_batch.seq_lens):
            return False
        lens = [int(length) for length in lens]
        # Tokens that pad a captured prefill belong to no sequence.
        longest = tokens if self.prompts is not None else SHORT
        return len(lens) > 0 and sum(lens) == tokens and max(lens) <= longest

    def _attend(self, call: _Call) -> torch.Tensor:
        layer, forward_batch, q = call.layer, call.forward_batch, call.q
        pool = self._pool(forward_batch)
        if call.k is not None and call.save_kv_cache:
            _write(pool, call)
        heads, width, width_v = layer.tp_q_head_num, layer.head_dim, layer.v_head_dim
        queries, q_rope = (q.reshape(-1, heads, width), None) if call.q_rope is None else call.query_parts()
        # A new pass begins with another batch, or with a layer that is not further up.
        if forward_batch is not self._batch or layer.layer_id <= self._layer:
            self._begin(forward_batch, heads, queries.shape[0])
        self._batch, self._layer = forward_batch, layer.layer_id
        packed = self._cu_seqlens_q is not None
        cache = pool.get_key_buffer(layer.layer_id).view(-1, self.page_size, width)
        in_parts = cache.dtype not in FP8 and takes_query_parts(queries, heads, self._max_seqlen_q)
        if q_rope is not None and not in_parts:
            queries, q_rope = call.joined_queries(), None
        q_descale, descale = None, getattr(layer, "k_scale", None) if cache.dtype in FP8 else None
        descale = None if descale is None else torch.as_tensor(descale, device=cache.device).float().reshape(1)
        if self._fp8_queries and cache.dtype in FP8 and queries.dtype == torch.bfloat16:
            # As SGLang's backend of FlashMLA does it, by the scale of the keys.
            q_descale = self._one if descale is None else descale
            queries = scaled_fp8_quant(queries.reshape(-1, width), q_descale)[0].view(queries.shape)
        if not packed:
            queries = queries.unflatten(0, (self._lens.shape[0], -1))
            q_rope = None if q_rope is None else q_rope.unflatten(0, (self._lens.shape[0], -1))
        out, _ = mla_suite.decode(
            queries,
            cache,
            self._lens,
            self._table,
            cu_seqlens_q=self._cu_seqlens_q,
            q_descale=q_descale,
            kv_descale=descale,
            plan=self._plan,
            tree_mask=self._tree_mask,
            q_rope=q_rope,
            softmax_scale=layer.scaling,
            max_seqlen_q=self._max_seqlen_q,
            head_dim_v=width_v,
            kv_format=KV_FORMATS[cache.dtype],
            split_size=self._split_size,
            precision=PRECISION,
        )
        return out.reshape(-1, heads * width_v)

    @property
    def _split_size(self) -> int:
        """Keys per split where SGLang asks for deterministic inference, which for us is batch-invariant; else 0."""
        return int(self.split_tile_size) if self.enable_deterministic and self.split_tile_size else 0

    def _pool(self, forward_batch: Any) -> Any:
        return getattr(forward_batch, "token_to_kv_pool", None) or self.token_to_kv_pool

    def _begin(self, forward_batch: Any, heads: int, tokens: int) -> None:
        """Make what all layers of the pass share."""
        mode = forward_batch.forward_mode
        lens = forward_batch.seq_lens
        batch = lens.shape[0]
        self._max_seqlen_q, self._cu_seqlens_q, self._tree_mask, drafts = 1, None, None, 0
        if mode.is_target_verify():
            self._max_seqlen_q = drafts = tokens // batch
            lens = lens + drafts  # SGLang counts the drafts when they are accepted
            if not is_chain(forward_batch.spec_info):
                # A captured step reads the buffer that SGLang fills before a replay, which its metadata holds.
                self._tree_mask = sglang_trees.words(self.forward_metadata.custom_mask, batch, drafts)
        elif mode.is_extend():
            own = forward_batch.extend_seq_lens
            self._cu_seqlens_q = torch.nn.functional.pad(own.cumsum(0), (1, 0)).int()
            self._max_seqlen_q = max(map(int, forward_batch.extend_seq_lens_cpu))
        fewest = fp8_query_rows(self._one, self.page_size, joined=False)
        # As many drafts as the server verifies count in every pass, so that a token's queries are of one kind.
        rows = heads * (self.num_draft_tokens or 1)
        self._fp8_queries = fewest is not None and rows >= fewest
        self._lens = lens.int()
        width = self.req_to_token.shape[1]
        host_lens = getattr(forward_batch, "seq_lens_cpu", None)
        if host_lens is not None and len(host_lens) and not capturing(self._lens):
            # A captured table must serve every later length.
            width = min(width, int(torch.as_tensor(host_lens).max()) + drafts)
        pages = self.req_to_token[:, : max(width, 1) : self.page_size]
        self._table = (pages[forward_batch.req_pool_indices.long()] // self.page_size).int()
        given = by_token.Batch(self._lens, self._table, self._cu_seqlens_q, self._max_seqlen_q)
        self._lens, self._table, self._cu_seqlens_q, self._max_seqlen_q = by_token.arranged(given, tokens, heads)
        self._plan = None
        if drafts or self._max_seqlen_q <= SHORT:
            self._plan = mla_suite.plan(
                self._lens,
                num_heads=heads,
                max_seqlen_q=self._max_seqlen_q,
                max_seqlen_kv=self._table.shape[1] * self.page_size if self._split_size else 0,
                split_size=self._split_size,
            )


def _check_interface() -> Interface:
    """The installed SGLang; TypeError where it is not one that the class above was made for. Cheap."""
    interface = Interface(NAME, "SGLang", __version__, TESTED, OTHERWISE)
    base = TritonAttnBackend
    interface.has("TritonAttnBackend", base, ("forward_decode", "forward_extend", "shared_read_ends"))
    interface.takes("TritonAttnBackend", base.__init__, ("model_runner",))
    interface.takes("TritonAttnBackend.forward_decode", base.forward_decode, CALL)
    interface.takes("TritonAttnBackend.forward_extend", base.forward_extend, CALL)
    interface.takes("TritonAttnBackend.shared_read_ends", base.shared_read_ends, ("fm",))
    interface.takes("ForwardBatch", ForwardBatch, BATCH)
    interface.has("ForwardMode", ForwardMode, MODES)
    interface.has("MLATokenToKVPool", MLATokenToKVPool, ("get_key_buffer", "set_kv_buffer", "set_mla_kv_buffer"))
    interface.warn_if_newer(stacklevel=3)
    return interface


def is_chain(drafts: Any) -> bool:
    """Returns whether each draft of a sequence follows the one before it, and all sequences have as many drafts.

    N-gram drafts are a tree whatever their breadth is: matches of several lengths, and padding, start at its root.
    """
    topk = getattr(drafts, "tree_topk", getattr(drafts, "topk", -1))
    return topk == 1 and getattr(drafts, "ragged_verify_layout", None) is None


def _absorbed(layer: Any, pool: Any) -> bool:
    """Returns whether the layer's keys are the rows of a latent cache; un-absorbed prefill has a head's own keys."""
    return layer.tp_k_head_num == 1 and layer.head_dim == pool.kv_cache_dim and layer.v_head_dim == pool.kv_lora_rank


def _check_softmax(call: _Call) -> None:
    """Refuse a call whose scores are not a plain softmax over all keys."""
    for name in call.options:
        refuse(NAME, f"{name} is given", f"scores are plain softmax: {OTHERWISE}")
    layer = call.layer
    if layer.logit_cap:
        refuse(NAME, f"logit_cap is {layer.logit_cap}", f"scores are not capped: {OTHERWISE}")
    window = getattr(layer, "sliding_window_size", None)
    if window is not None and window > -1:
        refuse(NAME, f"sliding_window_size is {window}", f"all keys are attended to: {OTHERWISE}")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        given = f"xai_temperature_len is {layer.xai_temperature_len}"
        refuse(NAME, given, f"queries are not rescaled by position: {OTHERWISE}")


def _write(pool: Any, call: _Call) -> None:
    """Write new rows where SGLang says, divided by k_scale as its own backends store them."""
    layer, batch, k, k_rope = call.layer, call.forward_batch, call.k, call.k_rope
    for_batch = getattr(KVWriteLoc, "for_batch", None)  # from 0.5.22 on; before it the pool takes the bare slots
    slots = batch.out_cache_loc if for_batch is None else for_batch(batch)
    scale = getattr(layer, "k_scale", None)
    if scale is not None:
        k = k / scale
        k_rope = None if k_rope is None else k_rope / scale
    if k_rope is not None:
        pool.set_mla_kv_buffer(layer, slots, k, k_rope)
    else:
        pool.set_kv_buffer(layer, slots, k, call.v)

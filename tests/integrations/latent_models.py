"""Tiny random models of every folder of transformers that has latent attention, and the table of docs/.

`python tests/integrations/latent_models.py --write` writes docs/transformers_models.md again.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import torch
import transformers

from mla_suite.integrations.transformers import patch, unpatch
from mla_suite.integrations.transformers_layer import LatentAttention
from mla_suite.integrations.transformers_store import latent_attentions

PAGE = Path(__file__).parents[2] / "docs" / "transformers_models.md"
VOCAB = 96
PROMPT, STEPS = 9, 5
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "q_lora_rank": None}
# Positions past original_max_position_embeddings are scaled: the test's prompt crosses it.
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# The second layer has no rope, and the third reads the first one's latents with an indexer of its own.
MISTRAL_LARGE4 = {
    "indexer_types": ["full", "shared", "full"],
    "no_rope_layers": [1, 0, 1],
    "kv_source_layers": [0, 1, 0],
    "rope_parameters": {name: MISTRAL4_ROPE[name] for name in list(MISTRAL4_ROPE)[:6]} | {"attention_factor": 1.0},
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
# The text model and the vision model of classes that have both.
VISION_OF = {
    "kimi_k25": ("deepseek_v3", VISION),
    "mistral_large4": ("mistral_large4_text", VISION | {"model_type": "pixtral", "patch_size": 4, "image_size": 8}),
}
# The tests' prompts are longer than index_topk, so that the selection matters; with 16 heads no two keys score alike.
INDEXED = {"index_topk": 4, "index_head_dim": 80, "index_n_heads": 16, "num_hidden_layers": 3}
SHARED = INDEXED | {"indexer_types": ["full", "shared", "full"]}
# What makes one layer with an indexer of them.
ONE_LAYER = {
    "num_hidden_layers": 1,
    "layer_types": ["indexed_attention"],
    "indexer_types": ["full"],
    "no_rope_layers": [1],
    "kv_source_layers": [0],
}
# The window is smaller than the tests' prompts, and its layers have latents wider than 512.
DOTS3 = {
    "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
    "sliding_window_size": 4,
    "head_dim": 96,
    "shared_experts_intermediate_size": 32,
    **{f"swa_{name}": TINY[name] for name in ("num_attention_heads", "num_key_value_heads", "q_lora_rank")},
    **{"swa_kv_lora_rank": 1024, "swa_head_dim": 96, "swa_qk_nope_head_dim": 32, "swa_v_head_dim": 24},
}
# By folder: the class that is patched, and the fields in which its tiny config differs.
PATCHED = {
    "axk1": ("AXK1ForCausalLM", {}),
    "axk2": ("AXK2ForCausalLM", INDEXED | {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "gated_norm_rank": 8}),
    "bailing_hybrid": ("BailingHybridForCausalLM", HYBRID | {"head_dim": 16}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED),
    "dots3_note": ("Dots3NoteForCausalLM", INDEXED | DOTS3),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", SHARED),
    "hy_v4": ("HYV4ForCausalLM", SHARED | {"learnable_sink_init": 0.5}),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", {}),
    "kimi_linear": ("KimiLinearForCausalLM", HYBRID | {"linear_head_dim": 16, "linear_num_heads": 4}),
    "longcat_flash": ("LongcatFlashForCausalLM", {"num_layers": 1, "expert_ffn_hidden_size": 32}),
    "minicpm3": ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "scale_emb": 1}),
    "mistral4": ("Mistral4ForCausalLM", {"kv_lora_rank": 256, "rope_parameters": MISTRAL4_ROPE}),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", INDEXED | MISTRAL_LARGE4),
    "sarvam_mla": ("DeepseekV3ForCausalLM", {}),  # a config of its own, and this class
    "youtu": ("YoutuForCausalLM", {}),
}
PATCHED = {folder: made for folder, made in PATCHED.items() if hasattr(transformers, made[0])}  # this release has
SELECTING = [folder for folder, (_, fields) in PATCHED.items() if "index_topk" in fields]
# By folder: a class that keeps its own cache and calls our attention. All keys of its window, of its compressor and of
# its indexer are fewer than the tests' prompts.
KEEPS_CACHE = {
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "sliding_window": 4,
            "num_key_value_heads": 1,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_topk": 2,
            "index_head_dim": 64,
            "index_n_heads": 4,
            "hc_mult": 2,
        },
    ),
}
KEEPS_CACHE = {folder: made for folder, made in KEEPS_CACHE.items() if hasattr(transformers, made[0])}
TRACED_ALWAYS = ("mistral4",)  # its step is traced with every run, and compiled with those of the others by `full`
LOOPING_EXPERTS = ("longcat_flash",)  # their own loop over the chosen experts cannot be compiled, patched or not
# By folder: a class whose selection does not reach our attention, and what makes its config small enough for a test.
REFUSED = {
    "glm5_next": ("Glm5NextForConditionalGeneration", {"num_hidden_layers": 4}),
    "hy_v4_vl": ("HYV4VLForConditionalGeneration", {"num_hidden_layers": 4}),
}
REFUSED = {folder: made for folder, made in REFUSED.items() if hasattr(transformers, made[0])}
NOT_LATENT = {"deepseek_ocr2": "its text layers are Llama's, and kv_lora_rank is taken out of its config"}


@cache
def folders() -> frozenset[str]:
    """The folders of transformers.models that speak of latents, or whose config asks for a model that does."""
    root = Path(transformers.__file__).parent / "models"
    found = set()
    for path in root.glob("*/*_*.py"):
        if path.name.startswith(("modeling_", "configuration_", "modular_")):
            text = path.read_text()
            asks = re.search(r'SubConfigSpec\([^)]*model_type="(deepseek_v[23]|mistral4|longcat_flash|youtu)"', text)
            if "kv_lora_rank" in text or "expand_kv" in text or asks:
                found.add(path.parent.name)
    return frozenset(found | {"deepseek_v4"})  # its latents are compressed by other names


def make(folder: str, **changes):
    """The folder's tiny model with random weights, fp32, on the CPU."""
    name, own = (PATCHED | KEEPS_CACHE)[folder]
    model_class = getattr(transformers, name)
    fields = TINY | own | changes
    if folder in VISION_OF:
        kind, vision = VISION_OF[folder]
        fields = {"text_config": {"model_type": kind, **fields}, "vision_config": vision}
        fields |= {name: TINY[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "self_attn" in parameter_name and parameter_name.endswith(("bias", "norm.weight", "sinks")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def left_padded():
    """Two prompts of different lengths, and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=generator)
    mask = (torch.arange(PROMPT) >= PROMPT - torch.tensor([[PROMPT], [5]])).long()
    return ids * mask, mask


@torch.no_grad()
def greedy(model, cache=None, fed=None, steps=STEPS):
    """The tokens of steps after the prompts, and the logits of all tokens but the last, where prompts are padded zeros.

    The tokens `fed` [batch, steps] take the place of the chosen ones.
    """
    ids, mask = left_padded()
    logits, tokens = [], []
    for i in range(steps):
        new = slice(mask.shape[1] - ids.shape[1], None)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, new]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits.masked_fill(mask[:, new, None] == 0, 0))
        ids = out.logits[:, -1:].argmax(-1) if fed is None else fed[:, i : i + 1]
        tokens.append(ids)
        mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def one_graph(model, cache, expected, backend: str = "eager"):
    """The patched model's compiled step, which gave the tokens `expected` behind the prompts as one graph."""
    ids, mask = left_padded()
    compiled, counters = compiled_behind_a_prompt(model, ids, mask, cache, backend)
    lens = mask.sum(1, keepdim=True)
    for i in range(STEPS - 1):
        out = compiled(input_ids=expected[:, i : i + 1], position_ids=lens + i, past_key_values=cache)
        assert torch.equal(out.logits[:, -1].argmax(-1), expected[:, i + 1])
    assert counters["stats"]["unique_graphs"] == 1
    return compiled


def compiled_behind_a_prompt(model, ids, mask, cache, backend: str = "eager"):
    """The patched model, compiled whole after it has read the prompts, and torch's counters of what compiling does."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    return torch.compile(model, fullgraph=True, backend=backend), counters


def make_refused(folder: str):
    """The folder's model without weights."""
    name, own = REFUSED[folder]
    model_class = getattr(transformers, name)
    fields = {"text_config": own} if name.endswith("ForConditionalGeneration") else own
    with torch.device("meta"):
        return model_class(model_class.config_class(**fields))


def release() -> str:
    """The release of transformers that is installed, as the page names it."""
    return "transformers " + ".".join(transformers.__version__.split(".")[:2])


def table() -> str:
    """docs/transformers_models.md, from what `patch` does with each model."""
    rows = []
    for folder in sorted(folders()):
        if folder in PATCHED:
            model = make(folder)
            patch(model)
            layers = [layer for _, _, layer in latent_attentions(model)]
            how = "whole layer" if isinstance(layers[0], LatentAttention) else "attention"
            how = "attention to selected keys" if folder in SELECTING else how
            unpatch(model)
            kinds = [type(model).config_class().get_text_config(decoder=True)]
            if any(getattr(layer, "sliding_window", None) for layer in layers):
                how += ", and to a window"
                kinds = [kinds[0].per_layer_config[kind] for kind in ("indexed_attention", "sliding_attention")]
            row = ", ".join(f"{sizes.kv_lora_rank} + {sizes.qk_rope_head_dim}" for sizes in kinds)
            step = "all but its experts" if folder in LOOPING_EXPERTS else "whole"
            rows.append(f"| {folder} | `{type(model).__name__}` | yes | {how} | {step} | {row} |")
        elif folder in KEEPS_CACHE:
            name = KEEPS_CACHE[folder][0]
            rows.append(f"| {folder} | `{name}` | yes | attention to visible keys | no | a cache of its own |")
        elif folder in REFUSED:
            try:
                patch(make_refused(folder))
            except (TypeError, ValueError) as error:
                name = REFUSED[folder][0]
                said = str(error).removeprefix(f"patch: {name} ").split("; ")[0]
                rows.append(f"| {folder} | `{name}` | no | {said} | | |")
        else:
            rows.append(f"| {folder} | | no | {NOT_LATENT[folder]} | | |")
    return INTRODUCTION.replace("{release}", release()) + "\n".join(rows) + "\n"


INTRODUCTION = """# Models of transformers

The table lists every model of {release} whose code speaks of multi-head latent attention, and what
`mla_suite.integrations.transformers.patch` does with it. Tiny random models of each patched row give the unpatched
model's tokens in fp32 (`tests/integrations/test_transformers_models.py`).
`python tests/integrations/latent_models.py --write` makes this page.

| words of the table | mean |
|---|---|
| whole layer | `MLA` replaces the layer; the kernels that write and read the cache also apply rope |
| attention | the layer keeps its projections, norms, gates and rope, and calls our attention |
| attention to selected keys | the same, and the layer keeps its indexer or takes the choice of another layer |
| and to a window | other layers have a sliding window: `decode` reads the newest keys alone |
| attention to visible keys | the layer keeps its compressor, indexer and cache too, and calls `sparse_decode` |
| compiled step | what `torch.compile(model, fullgraph=True)` takes of a step, as one graph for all lengths |
| cached token | its elements with the folder's default config, which is what the cache holds |

- With *attention to selected keys* every token, of a prompt or not, goes through `sparse_decode` over the keys that
  were selected for it; where all keys are selected, attention is dense. The indexer's own keys are cached beside the
  latents, `index_head_dim` elements a token. A layer that reads another layer's latents keeps a copy of them. As with a
  static cache of transformers, a step scores all `max_len` keys; `torch.topk` chooses among keys with equal scores.
- A layer with a window caches all tokens. The window counts a sequence's own tokens, as positions do; transformers
  counts columns of the mask, so the two differ where padding lies between tokens.
- DeepSeek V4 takes any cache of transformers and no `LatentCache`, so no byte is saved. Where transformers holds the
  scores of a prompt against all keys, here each token reads the keys that it sees. The model cannot be compiled whole,
  patched or not, since its compressor's state grows.
- The test traces `mistral4` in every run and compiles each row in `tox run -e full`. LongCat's experts loop over those
  that were chosen, a number that the compiler cannot know, so `fullgraph=True` refuses the unpatched model as well. The
  test puts that loop behind an operator of its own, and all else compiles.

The same lines serve every patched row; this is the smallest:

```python
import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM
from mla_suite.integrations.transformers import LatentCache, patch

small = MiniCPM3Config(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=32, v_head_dim=32, max_position_embeddings=128,
)  # fmt: skip
model = MiniCPM3ForCausalLM(small).eval()
tokens = torch.randint(3, 64, (1, 9))
options = dict(max_new_tokens=3, do_sample=False)
expected = model.generate(tokens, **options)
with patch(model):
    made = model.generate(tokens, past_key_values=LatentCache(model, batch=1, max_len=32), **options)
print(torch.equal(made, expected))  # True
```

| folder | class | patched | how, or why not | compiled step | cached token |
|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(table())
    else:
        print(table(), end="")

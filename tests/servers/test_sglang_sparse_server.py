"""SGLang's own server decodes a DeepSeek V3.2 through our sparse decode on a CPU: `tox -e sglang`.

Its own indexer selects the keys, with the stand-ins of sglang_sparse_cpu.py. Greedy tokens must equal those of
transformers, whose indexer is another and in fp32.
"""

import installed_plugins
import sglang_server
import sglang_sparse_cpu
import tiny_deepseek

TOPK = 64
LENGTHS = [5, 40, 17, 60]  # no prompt has more keys than TOPK, since SGLang's selection in a prompt wants a GPU
INDEXER = {"index_n_heads": 32, "index_head_dim": 128}
LAYERS, NEW_TOKENS = tiny_deepseek.LAYERS, tiny_deepseek.NEW_TOKENS


def test_the_keys_that_sglangs_indexer_selects(tmp_path):
    folder = tmp_path / "model"
    shape = {**sglang_server.SHAPE, **INDEXER, "num_nextn_predict_layers": 0}
    model = tiny_deepseek.save_model(folder, "V32", **shape, index_topk=TOPK)
    sglang_server.save_tokenizer(folder)
    batch = tiny_deepseek.prompts(LENGTHS)
    expected = [tiny_deepseek.greedy(model, prompt) for prompt in batch]
    with sglang_server.server(
        folder, tmp_path, sglang_sparse_cpu.PLUGINS, sglang_sparse_cpu.VARIABLES, **sglang_sparse_cpu.OPTIONS
    ) as address:
        tokens, _ = sglang_server.generate(address, batch)
    assert tokens == expected
    (calls,) = installed_plugins.calls(tmp_path)
    assert len(calls) >= LAYERS * (NEW_TOKENS - 1)
    assert {format for call in calls for format in call["kv_formats"]} == {"bf16"}
    keys = {count for call in calls for count in call["keys"]}
    assert max(keys) == TOPK < max(LENGTHS) + NEW_TOKENS - 1
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = model.config.max_position_embeddings
    assert tiny_deepseek.greedy(model, batch[-1]) != expected[-1], "these prompts would not show a wrong selection"

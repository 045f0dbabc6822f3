"""Registration with vLLM and SGLang, for each of the processes that a server starts.

Both servers call these functions through the entry points that mla_suite installs (`vllm.general_plugins`,
`sglang.srt.plugins`), and a program that has mla_suite on its path alone calls them itself. Nothing of a backend is
imported before it is chosen, so registering costs nothing where another backend runs.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

from mla_suite.integrations import With

SPARSE_NAME = "MLA_SUITE_SPARSE"
V4_NAME = "MLA_SUITE_DSV4"
V4_MODELS = {
    "DeepseekV4ForCausalLM": "vllm.models.deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "vllm.models.deepseek_v4",
    "DeepseekV41ForCausalLM": "vllm.models.deepseek_v41",
}
"""Models whose code in vLLM names its attention itself -> the package with that code. Drafts use the same code."""
SGLANG_NAME = "mla_suite"
DSA_NAMES = {"dsa", "nsa"}  # SGLang's backend for models with an indexer, and its old name
V4_NAMES = {"dsv4"}  # that for DeepSeek V4 and V4.1
DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
DRAFT_CHECKS = "sglang.srt.arg_groups.speculative_hook"
V41_CHOICE = "sglang.srt.mem_cache.deepseek_v4_memory_pool.select_dsv4_kv_layout"
TREE_BACKENDS = {"_handle_eagle_family": "triton", "_handle_ngram": "flashinfer"}
"""SGLang's functions that check a server's drafts -> a backend that each lets have trees of drafts and pages."""


def vllm() -> None:
    """Put our dense backend behind `--attention-backend CUSTOM`, the entry that vLLM keeps for backends from outside.

    vLLM 0.32 and 0.33 take new names as well: the backend for models with an indexer is MLA_SUITE_SPARSE, and that for
    DeepSeek V4 and V4.1 MLA_SUITE_DSV4. A process may call this twice.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "mla_suite.integrations.vllm.MLASuiteBackend")
    if hasattr(AttentionBackendEnum, "register"):
        # A new name is registered once; from then on it is a member, which may be registered again.
        classes = {
            SPARSE_NAME: "mla_suite.integrations.vllm_sparse.MLASuiteSparseBackend",
            V4_NAME: "mla_suite.integrations.vllm_v4.MLASuiteV4Backend",
        }
        for name, path in classes.items():
            register_backend(AttentionBackendEnum.__members__.get(name, name), path)
        _offer_v4()


def _offer_v4() -> None:
    """Put a module of ours, imported when such a model is, in the place of vLLM's models that name their attention."""
    from vllm.model_executor.models import ModelRegistry

    for name, package in V4_MODELS.items():
        if find_spec(package) is not None:
            ModelRegistry.register_model(name, f"mla_suite.integrations.vllm_v4:{name}")


def sglang() -> None:
    """Add our name to three options: `--attention-backend`, `--dsa-decode-backend` for models with an indexer, and
    `--dsv4-attn-backend` for DeepSeek V4 and V4.1.

    The first is for deterministic inference with the radix cache as well: SGLang has two lists for that, and takes no
    MLA model where the second does not name the backend. A process may call this twice.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry

    if SGLANG_NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([SGLANG_NAME])
        server_args.add_deterministic_attention_backend_choices([SGLANG_NAME])
        server_args.add_radix_supported_deterministic_attention_backend_choices([SGLANG_NAME])
    expanding = getattr(server_args, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", [SGLANG_NAME])
    if SGLANG_NAME not in expanding:
        expanding.append(SGLANG_NAME)  # to others SGLang hands no expanded keys of a cached prefix
    attention_registry.register_attention_backend(SGLANG_NAME)(_sglang_backend)
    _keep_drafts_on_triton()
    _offer_v41_records()
    _add_choice(server_args.ServerArgs, attention_registry, "dsa_decode_backend", DSA_NAMES, _take_sparse_class)
    _add_choice(server_args.ServerArgs, attention_registry, "dsv4_attn_backend", V4_NAMES, _take_v4_kernels)


def _add_choice(ServerArgs: Any, registry: Any, name: str, backends: Collection[str], prepare: Any) -> None:
    """Add our name to the choices of an option; where it is given, `prepare` runs before SGLang makes its backend.

    SGLang has functions that add to the choices of other options, and none for these; its parser reads the list.
    """
    option = get_type_hints(ServerArgs, include_extras=True).get(name)
    if option is None:
        return  # versions without the option, or with another name for it
    (argument,) = option.__metadata__
    if SGLANG_NAME not in argument.choices:
        argument.choices.append(SGLANG_NAME)
        for backend in registry.ATTENTION_BACKENDS.keys() & backends:
            made = partial(_prepared, registry.ATTENTION_BACKENDS[backend], name, prepare)
            registry.register_attention_backend(backend)(made)


def _prepared(theirs: Any, option: str, prepare: Any, model_runner: Any) -> Any:
    from sglang.srt.runtime_context import get_exec

    if getattr(get_exec().kernel, option) == SGLANG_NAME:
        prepare(model_runner)
    return theirs(model_runner)


def _take_v4_kernels(model_runner: Any) -> None:
    from mla_suite.integrations import sglang_v4

    sglang_v4.take_kernels(model_runner)


def _take_sparse_class(model_runner: Any) -> None:
    """Our class goes by SGLang's name in SGLang's module, since the backends of draft layers are made by that name."""
    from mla_suite.integrations import sglang_sparse

    sglang_sparse.dsa_backend.DeepseekSparseAttnBackend = sglang_sparse.MLASuiteSparseAttnBackend


def _keep_drafts_on_triton() -> None:
    """Draft models take SGLang's Triton backend, since SGLang has a closed list of backends for their several steps."""
    try:
        _put_around(DRAFT_BACKENDS, _with_triton_drafts)
    except ImportError:
        return  # versions without hooks need --speculative-draft-attention-backend triton
    for function, backend in TREE_BACKENDS.items():
        _put_around(f"{DRAFT_CHECKS}.{function}", partial(_with_trees, backend))


def _put_around(theirs: str, ours: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(theirs, ours, HookType.AROUND)


def _offer_v41_records() -> None:
    """Where the environment asks for V4.1's own records, let our backend store them on H100 and H200."""
    from sglang.srt.environ import envs

    layout = getattr(envs, "SGLANG_DSV4_KV_LAYOUT", None)  # not in versions before V4.1
    if layout is not None and layout.get().lower().startswith("v41"):
        _put_around(V41_CHOICE, _with_v41_records)


def _with_v41_records(original: Any) -> Any:
    from mla_suite.integrations import sglang_v41

    return sglang_v41.select_layout(original, SGLANG_NAME)


def _with_triton_drafts(original: Any, factory: Any, name: str, backends: dict, *args: Any, **kwargs: Any) -> Any:
    return original(factory, name, {**backends, SGLANG_NAME: backends["triton"]}, *args, **kwargs)


def _with_trees(backend: str, original: Any, *args: Any) -> Any:
    """SGLang's check of a server's drafts, to which ours goes by the name of a backend that may verify trees.

    The check has a list of names inside of a function, and refuses pages of several tokens to all others.
    """
    checks = import_module(DRAFT_CHECKS)
    settings_of = checks.resolved_view

    def named(server_args: Any) -> Any:
        settings = settings_of(server_args)
        if settings.attention_backend != SGLANG_NAME:
            return settings
        return With(settings, attention_backend=backend)

    checks.resolved_view = named  # type: ignore[attr-defined]
    try:
        return original(*args)
    finally:
        checks.resolved_view = settings_of  # type: ignore[attr-defined]


def _sglang_backend(model_runner: Any) -> Any:
    from mla_suite.integrations import sglang as backend  # before all else of SGLang: it says what it needs of it

    _ask_for_parts(model_runner)
    backend.sglang_prompts.register(SGLANG_NAME)
    return backend.MLASuiteAttnBackend(model_runner)


def _ask_for_parts(model_runner: Any) -> None:
    """Have SGLang hand queries and keys over in two parts, as to its own backends: for others torch.cat joins them.

    Not for models whose queries SGLang scales where it joins them, and only on CUDA: on ROCm more depends on that list,
    and on a CPU there is no kernel that writes keys in two parts.
    """
    import torch
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as backends

    scaled = getattr(model_runner.model_config.hf_config, "llama_4_scaling", None) is not None
    if not scaled and torch.version.cuda is not None and SGLANG_NAME not in backends:
        backends.append(SGLANG_NAME)

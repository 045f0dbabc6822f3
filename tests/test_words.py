"""Retired words stay out of the tree, and comments begin like sentences.

A retired word is a private name for something that the field has a name for. The right side says which. A line of the
allow-list names a file, a word and the reason why the word stands there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUFFIXES = (".py", ".md", ".hpp", ".cu", ".hip", ".cpp", ".h", ".toml", ".ini", ".csv")
# The changelog says what was renamed, and this file what is retired.
NOT_READ = ("CHANGELOG.md", "tests/test_words.py")

RETIRED = {
    r"max_q_len": "max_seqlen_q",
    r"max_kv_len": "max_seqlen_kv",
    r"core[./]layouts": "kv_formats",
    r"mla_suite[./]toolchain": "mla_suite.build",
    r"mla_suite[./]runtime": "mla_suite.launch",
    r"csrc/mla\b": "csrc/common",
    r"\bportable\b": "triton",
    r"\bcrumbs?\b": "min_split",
    r"\breadied\b": "prepared",
    r"\bfading\b": "alpha",
    r"\brivals?\b": "baseline",
    r"\bcontenders?\b": "runners",
    r"\b[Hh]opper(?:Config)?(?=[._(])": "sm_90",
    r"\bcdna4_config\b|\bCdna4Config\b": "gfx950",
    r"\bhand_over\b": "publish_p, publish_o",
    r"\btwo_cuts\b|\bTWO_CUTS\b": "pair_lse_merge",
    r"\bTOGETHER\w*\b": "cluster_reduce_o",
    r"\bSIDES\w*\b": "cluster_exchange_p",
    r"\bNOT_YET\b": "SENTINEL",
    r"\bawaiting_combine\b|\bAwaitingCombine\b": "streaming_combine",
    r"\bplanned_combine\b|\bPlannedCombine\b": "persistent_combine",
    r"\bslotted_tile\b|\bSlottedTile\b": "swizzled_lds_tile",
    r"\bhead_(products|kernels)\b": "absorb",
    r"\blatent_kernels\b": "qkv_down_proj_triton",
    r"\bslot_ring\b|\bSlotRing\b": "lds_ring",
    r"\brow_stage\b|\bRowStage\b": "kv_stage",
    r"\bsparse_places\b": "gather_layout",
    r"\b(take|give)_turn\b": "griddep_wait, griddep_launch_dependents",
    r"\bfaces\b": "eager, integrations",
    r"\bappend_(one|rows|last)\b": "append_single, append_bulk, append_dedup",
    r"\bPROMISE_BYTES\b": "sentinel_fill",
    r"\bSHARED_WAY_US\b|\bAWAITED_US\b": "a field of the cost model",
    r"\bMOST_[A-Z]\w*|\bLONGEST_[A-Z]\w*": "MAX_",
    r"(?<!\w)SMALLEST_[A-Z]\w*": "MIN_",
    r"\bplan/(cost|layout|native)\.py\b": "scheduler.py, metadata.py, archs/plan.py",
    r"\b[Ww]orkers?\b|\b\w+_workers?\b|\bWORKERS\w*\b": "SM part, num_sm_parts, grid_stride",
    r"\b[Cc]uts?\b|\bcuts?_\w+|\b\w+_cuts?\b": "split, split point",
    r"\b[Oo]ffer(?:s|ed|ing)?\b": "Supported, Unsupported, answer",
    r"\b[Rr]efusals?\b": "Unsupported, error, reason",
    r"\bROWS\b": "BLOCK_M, SHAPES",
    r"\btold\b": "found, reported, distinguished",
    r"\b(?:is|on)_hopper\b": "a property of the device",
    r"\bawaited\b": "streaming",
    r"\bGRANULE\b|\bgranules_\w+": "SPLIT_ALIGNMENT",
    r"\b[Ff]loor [0-9]\b|\bFLOORS = \{|\bown_floor\b": "layer",
    r"\blse_place\b": "lse_offset",
    r"\bso many\b(?! that)": "n, or the number itself",
    r"\b[Ww]hoever\b": "the caller, the thread",
}
ALLOWED = {
    ("mla_suite/kv_formats/encode.py", "portable"): "a cast that differs between versions of torch, in plain English",
}
# Where a word of the list means something else: (what is found, the folders or files) -> why it stands there.
ALLOWED_IN = {
    (r"\w*[Ww]orkers?\w*", ("csrc/emulator/", "tests/servers/")): "threads of the host; vLLM's processes",
    (
        r"ROWS",
        (
            "csrc/",
            "mla_suite/archs/combine.py",
            "docs/kernel_engineer.md",
            "tests/build/",
            "tests/kernels/",
        ),
    ): ("the macro of an instance, so part of its object's name, by which builds are compared with earlier ones"),
}
FRAGMENT = re.compile(r"^\s*(?:#|//|\"\"\"|///)\s*(?:Of|That|Whoever|What|As \w+ as)\b(?! (?:is|are|was|said)\b.*\?)")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if name.endswith(SUFFIXES) and name not in NOT_READ]


def allowed_in(name: str, found: str) -> bool:
    return any(re.fullmatch(word, found) and name.startswith(places) for word, places in ALLOWED_IN)


FILES = tracked()


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_gone(word):
    pattern = re.compile(word)
    found = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for match in pattern.finditer(line):
                if (name, match[0]) not in ALLOWED and not allowed_in(name, match[0]):
                    found.append(f"{name}:{number}: {match[0]!r}")
    assert not found, f"use {RETIRED[word]}:\n" + "\n".join(found[:20])


def test_no_comment_begins_with_a_fragment():
    found = []
    for path in FILES:
        if path.suffix in (".md", ".csv"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if FRAGMENT.match(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize("line", ["# Of a workgroup of one token", "// That what waits", '    """What a call needs'])
def test_a_fragment_is_recognised(line):
    assert FRAGMENT.match(line)

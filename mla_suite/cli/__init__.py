"""Layer 5: `python -m mla_suite <command>`, one file per command.

A command module has `add_arguments(parser)` and `run(args) -> int`, and its docstring is its `--help`. What it raises
as a ValueError is a sentence about its arguments: it is printed, and the exit status is 2; after Ctrl-C it is 130.
Modules are imported only when their command is asked for, so `build` works where torch is not installed.
"""

INTERRUPTED = 130

COMMANDS = {
    "demo": "decode a small DeepSeek-style model through torch.compile and compare it with the eager reference",
    "build": "compile the kernels for AMD and NVIDIA GPUs; needs no GPU",
    "kernels": "show what was built: registers, LDS, spills, occupancy, instruction counts",
    "hazards": "check AMD machine code for missing wait states: what was built, or any disassembly",
    "formats": "print the byte map of every KV cache format",
    "bench": "measure the operators on named shapes, compare runs, write a page of plots",
    "emulate": "run an operator on an emulated AMD GPU: numbers, sanitizer findings, counters and bounds",
    "tune": "search configurations on this GPU and store the best with their provenance",
    "explain": "say which backend would run a problem, and why",
    "support": "print which implementation serves each operator on each arch",
}

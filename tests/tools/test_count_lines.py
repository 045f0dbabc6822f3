"""Lines of a repository by part: which files count, and where."""

import subprocess

import count_lines


def test_tracked_text_counts_once_and_in_its_part(tmp_path):
    files = {
        "mla_suite/a.py": 3,
        "ops/op/b.py": 2,
        "tools/c.py": 5,
        "tests/data.csv": 100,
        "csrc/sm_90/k.cu": 7,
        "csrc/README.md": 1,
        "docs/page.md": 9,
    }
    for name, lines in {**files, "tools/untracked.py": 50}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("line\n" * lines)
    (tmp_path / "mla_suite" / "ops").symlink_to("../ops")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", *files, "mla_suite/ops"], cwd=tmp_path, check=True)
    assert count_lines.counts(tmp_path) == {
        "mla_suite + ops": 5, "tools": 5, "benchmarks": 0, "tests": 0, "csrc": 8
    }  # fmt: skip

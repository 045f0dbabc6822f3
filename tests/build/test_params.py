"""Parameter structs: the Python mirror has the offsets that the headers declare, and refuses what it cannot read."""

import struct

import pytest
from sample_tree import PARAMS, edit

from mla_suite.archs import CSRC
from mla_suite.build import BuildError, build, params


def test_offsets_and_bytes():
    mirror = params.parse(PARAMS, "common/params/scale.hpp")
    assert mirror.name == "mla::ScaleParams"
    assert mirror.offsets == {"in": 0, "out": 8, "scale": 16, "count": 24, "stride": 32}
    assert mirror.size == 40
    assert [field.is_pointer for field in mirror.fields] == [True, True, False, False, False]
    values = {"in": 2**63 + 5, "out": 0, "scale": 0.5, "count": -3, "stride": 2**40}
    packed = mirror.pack(**values)
    assert packed == struct.pack("<QQf4xqq", 2**63 + 5, 0, 0.5, -3, 2**40)
    assert mirror.unpack(packed) == values


def test_an_array_is_as_many_fields():
    mirror = params.parse("struct P {\n  int32_t a;\n  uint64_t map[3];  // words\n  float b;\n};\n", "p")
    assert mirror.offsets == {"a": 0, "map_0": 8, "map_1": 16, "map_2": 24, "b": 32}
    packed = mirror.pack(a=1, map_0=2, map_1=3, map_2=4, b=0.5)
    assert packed == struct.pack("<i4xQQQf4x", 1, 2, 3, 4, 0.5)
    assert "__builtin_offsetof(P, map[2]) == 24 && sizeof(P::map[2]) == 8" in mirror.static_asserts()


def test_an_array_of_an_included_struct_is_its_fields_in_turn():
    pool = params.parse("namespace mla {\nstruct Pool {\n  float* at;  // [n]\n  int32_t n;\n};\n}\n", "pool")
    text = "struct P {\n  int32_t a;\n  Pool pool[2];  // both\n  int32_t b;\n};\n"
    mirror = params.parse(text, "p", {"Pool": pool})
    assert mirror.offsets == {"a": 0, "at_0": 8, "n_0": 16, "at_1": 24, "n_1": 32, "b": 40}
    assert mirror.size == 48
    packed = mirror.pack(a=1, at_0=2, n_0=3, at_1=4, n_1=5, b=6)
    assert packed == struct.pack("<i4xQi4xQi4xi4x", 1, 2, 3, 4, 5, 6)
    assert "__builtin_offsetof(P, pool[1].at) == 24 && sizeof(P::pool[1].at) == 8" in mirror.static_asserts()
    with pytest.raises(ValueError, match=r"p:3: scalar type Pool; possible are .*arrays of Pool"):
        params.parse(text.replace("pool[2]", "pool"), "p", {"Pool": pool})
    with pytest.raises(ValueError, match=r"p:3: scalar type Pool; possible are int32_t"):
        params.parse(text, "p")


@pytest.mark.parametrize(("asked", "size", "format"), [("", 16, "<qi4x"), ("alignas(64) ", 64, "<qi52x")])
def test_a_struct_ends_on_its_alignment(asked, size, format):
    """That of its widest field, unless it asks for more."""
    mirror = params.parse(f"struct {asked}P {{\n  int64_t a;\n  int32_t b;\n}};\n", "p")
    assert (mirror.name, mirror.size, mirror.pack(a=1, b=2)) == ("P", size, struct.pack(format, 1, 2))


def test_packing_names_unknown_and_missing_fields():
    mirror = params.parse(PARAMS, "common/params/scale.hpp")
    with pytest.raises(TypeError, match=r"unknown fields \['ins'\], missing fields \['in'\]"):
        mirror.pack(ins=0, out=0, scale=1.0, count=1, stride=1)
    with pytest.raises(TypeError, match=r"missing fields \['count', 'stride'\]"):
        mirror.pack(**{"in": 0}, out=0, scale=1.0)
    with pytest.raises(struct.error):
        mirror.pack(**{"in": -1}, out=0, scale=1.0, count=1, stride=1)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("  const half* x;  // [n]", "pointer to half; possible are void, float"),
        ("  float* x;", "pointer x has no comment; state its shape"),
        ("  double x;", "scalar type double; possible are int32_t"),
        ("  int32_t x, y;", "is not '<type> <name>;"),
        ("  int32_t x[n];", "is not '<type> <name>;"),
        ("  int32_t x[0];", "array x[0]; an array has at least one element"),
        ("  float* x[2];  // [n]", "array x[2]; an array has at least one element, and no pointers"),
        ("  int64_t count[2];\n  int32_t count_1;", "field count_1 is declared twice"),
        ("  bool x;", "scalar type bool"),
        ("  int64_t count;", "field count is declared twice"),
    ],
)
def test_a_line_outside_the_grammar_is_named(line, sentence):
    text = PARAMS.replace("  float scale;", line)
    with pytest.raises(ValueError, match=r"scale\.hpp:\d+: ") as caught:
        params.parse(text, "common/params/scale.hpp")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("kernel", sorted(path.stem for path in (CSRC / "common" / "params").glob("*.hpp")))
def test_every_parameter_says_what_it_is(kernel):
    """`explain --launches` prints these comments beside a call's values."""
    assert [field.name for field in params.load(kernel).fields if not field.meaning] == []


def test_one_struct_a_header():
    with pytest.raises(ValueError, match="2 parameter structs found"):
        params.parse(PARAMS + PARAMS, "p")
    with pytest.raises(ValueError, match="has no fields"):
        params.parse("struct P {\n};\n", "p")


def test_the_compiler_confirms_the_mirror(csrc, tmp_path):
    # Something the grammar does not see, and only the compiler's offsetof can.
    edit(csrc / "common" / "params" / "scale.hpp", "namespace mla {", "#pragma pack(1)\nnamespace mla {")
    with pytest.raises(BuildError, match="Python packs 8 bytes at 24"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")


def test_a_missing_header_is_named(csrc, tmp_path):
    (csrc / "common" / "params" / "scale.hpp").unlink()
    with pytest.raises(BuildError, match=r"gfx942 scale_threads-64: kernel parameters 'scale': no header"):
        build(["gfx942"], csrc=csrc, out=tmp_path / "objects")

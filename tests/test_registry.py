"""Checks everything an operator owes torch, by a walk over the registry: a new operator inherits all of it."""

import contextlib
import copy
import re
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import mla_suite
from mla_suite.core import register

CPU = torch.device("cpu")
SAMPLES = [(op, sample) for op in register.registry().values() for sample in op.samples()]
FIRST = [next(pair for pair in SAMPLES if pair[0] is op) for op in register.registry().values()]
BACKWARD = "has no backward: it is an inference operator; detach its inputs or use torch.no_grad()"


def each(pairs, in_default=None):
    """Every pair as parameters; a default run takes those of `in_default`, or all."""
    taken = [id(sample) for _, sample in (pairs if in_default is None else in_default)]
    marks = [[] if id(sample) in taken else [pytest.mark.full] for _, sample in pairs]
    return pytest.mark.parametrize(
        ("op", "sample"),
        [
            pytest.param(op, sample, marks=own, id=f"{op.name}-{sample.name}")
            for (op, sample), own in zip(pairs, marks, strict=True)
        ],
    )


def packet(op):
    return getattr(torch.ops.mla_suite, op.name)


def outputs_for(op, args, kwargs):
    """Poisoned tensors for the `.out` overload."""
    made = (torch.empty(o.shape, dtype=o.dtype) for o in op.specify(*args, **kwargs))
    return dict(zip(op.outputs, (tensor.fill_(torch.nan) for tensor in made), strict=True))


def tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def contents(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def same(one, other):
    """Equal bit for bit, NaN included."""
    return [contents(t).tolist() for t in tensors(one)] == [contents(t).tolist() for t in tensors(other)]


@each(SAMPLES)
def test_opcheck(op, sample):
    torch.library.opcheck(packet(op).default, *sample.make(CPU))


@each([pair for pair in SAMPLES if pair[0].outputs])
def test_opcheck_out(op, sample):
    args, kwargs = sample.make(CPU)
    torch.library.opcheck(packet(op).out, args, kwargs | outputs_for(op, args, kwargs))


@each(SAMPLES)
def test_a_tensor_on_another_device_is_refused(op, sample):
    """Each of them in turn, but for the first, whose device is the call's: a kernel would follow its address."""
    args, kwargs = sample.make(CPU)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for at in places[1:]:
        moved = [leaf.to("meta") if position == at else leaf for position, leaf in enumerate(leaves)]
        moved_args, moved_kwargs = pytree.tree_unflatten(moved, spec)
        with pytest.raises(ValueError, match="is on meta, and the call's first tensor on cpu; all tensors of a call"):
            packet(op)(*moved_args, **moved_kwargs)


@each([pair for pair in SAMPLES if pair[0].outputs])
def test_out_equals_functional(op, sample):
    args, kwargs = sample.make(CPU)
    outputs = outputs_for(op, args, kwargs)
    assert packet(op).out(*args, **kwargs, **outputs) is None
    assert same(tuple(outputs.values()), packet(op)(*args, **kwargs))


@each([pair for pair in FIRST if pair[0].outputs])
def test_outputs_whose_rows_share_memory_are_refused(op, sample):
    args, kwargs = sample.make(CPU)
    for name, good in outputs_for(op, args, kwargs).items():
        expanded = {name: good[:1].expand_as(good)}
        with pytest.raises(ValueError, match=f"{name} has strides .*; rows that share memory cannot be written"):
            packet(op).out(*args, **kwargs, **outputs_for(op, args, kwargs) | expanded)


@each([pair for pair in FIRST if pair[0].outputs])
def test_outputs_in_memory_that_is_still_needed_are_refused(op, sample):
    (first, *rest), kwargs = sample.make(CPU)
    outputs = outputs_for(op, (first, *rest), kwargs)
    (out, good), (lse, small) = outputs.items()

    def at_the_beginning(memory, like):
        return memory.view(torch.uint8).flatten()[: like.nbytes].view(like.dtype).view(like.shape)

    room = torch.empty(first.nbytes + good.nbytes, dtype=torch.uint8)
    first = at_the_beginning(room, first).copy_(first)
    cases = (out, at_the_beginning(room, good), op.functional.arguments[0]), (lse, at_the_beginning(good, small), out)
    for name, shared, other in cases:
        with pytest.raises(ValueError, match=f"{name} shares memory with {other}, which the call still needs"):
            packet(op).out(first, *rest, **kwargs, **outputs | {name: shared})


@each([pair for pair in FIRST if pair[0].outputs])
def test_outputs_that_are_no_tensors_are_refused(op, sample):
    args, kwargs = sample.make(CPU)
    for name in op.outputs:
        with pytest.raises(TypeError, match=f"{op.name}.out: {name} is None; it takes a tensor"):
            packet(op).out(*args, **kwargs, **outputs_for(op, args, kwargs) | {name: None})


@pytest.mark.parametrize("arch", [None, "gfx942"])
@each([pair for pair in FIRST if pair[0].outputs])
def test_outputs_made_in_inference_mode_are_written_outside_of_it(op, sample, arch):
    """Those that a backend copies its results to, because their rows lie apart, as well."""
    args, kwargs = sample.make(CPU)
    with mla_suite.emulate(arch) if arch else contextlib.nullcontext():
        expected = packet(op)(*args, **kwargs)
        with torch.inference_mode():
            made = [torch.empty(o.shape, dtype=o.dtype) for o in op.specify(*args, **kwargs)]
            first, second, *rest = made[0].shape
            made[0] = torch.empty(first, 2 * second, *rest, dtype=made[0].dtype)[:, :second]
        for _ in range(3):
            packet(op).out(*args, **kwargs, **dict(zip(op.outputs, made, strict=True)))
            assert all(map(torch.equal, made, expected))
            with torch.inference_mode():
                made[0].zero_()


def equal_to_eager(op, sample, backend):
    args, kwargs = sample.make(CPU)
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, k: packet(op)(*a, **k), fullgraph=True, backend=backend)
    mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
    assert same((compiled(mine, kwargs), mine), (packet(op)(*theirs, **kwargs), theirs))


@each(SAMPLES)
def test_compiled_equals_eager(op, sample):
    equal_to_eager(op, sample, "aot_eager")


@each(SAMPLES, FIRST)
def test_inductors_code_equals_eager(op, sample):
    """It calls the operator as it is, so one sample of each shows what it does."""
    equal_to_eager(op, sample, "inductor")


@each(SAMPLES)
def test_fake_equals_real_with_symbolic_sizes(op, sample):
    """Shape, dtype, stride and device, from metadata alone: a fake tensor has no data to guard on."""
    args, kwargs = sample.make(CPU)
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def fake(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return mode.from_tensor(leaf, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * leaf.dim()))

    with mode:
        imagined = packet(op)(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))
    real = packet(op)(*args, **kwargs)
    hint = lambda size: size.node.hint if isinstance(size, torch.SymInt) else size  # noqa: E731  read at once
    for f, r in zip(tensors(imagined), tensors(real), strict=True):
        assert [hint(size) for size in f.shape] == list(r.shape)
        assert [hint(stride) for stride in f.stride()] == list(r.stride())
        assert (f.dtype, f.device) == (r.dtype, r.device)


@each(SAMPLES)
def test_nothing_is_written_beyond_the_schema(op, sample):
    """By bytes, of the whole storage that an argument is a view of."""
    args, kwargs = sample.make(CPU)
    given = tensors((args, kwargs))
    written = {args[i].data_ptr() for i, name in enumerate(positional(op)) if name in op.mutates}
    before = [contents(tensor) for tensor in given]
    packet(op)(*args, **kwargs)
    if op.outputs:
        packet(op).out(*args, **kwargs, **outputs_for(op, args, kwargs))
    for tensor, old in zip(given, before, strict=True):
        assert tensor.data_ptr() in written or torch.equal(contents(tensor), old)


def positional(op):
    return [a.name for a in torch._C.parse_schema(op.qualname + op.functional.schema).arguments if not a.kwarg_only]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@each(FIRST)
def test_backward_is_refused_in_one_sentence(op, sample, compiled):
    """The forward takes tensors that require grad; what an operator writes into its arguments carries none."""
    args, kwargs = sample.make(CPU)
    torch._dynamo.reset()
    names = positional(op)

    def learn(leaf):
        learns = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.dtype.itemsize > 1
        return leaf.requires_grad_() if learns else leaf

    args = tuple(a if name in op.mutates else pytree.tree_map(learn, a) for name, a in zip(names, args, strict=False))
    call = torch.compile(packet(op), fullgraph=True, backend="aot_eager") if compiled else packet(op)
    results = tensors(call(*args, **kwargs))
    if op.mutates or not any(result.is_floating_point() for result in results):
        assert not any(tensor.requires_grad and not tensor.is_leaf for tensor in (*results, *tensors(args)))
        return
    loss = sum(result.float().sum() for result in results if result.is_floating_point())
    with pytest.raises(RuntimeError, match=op.name + " " + BACKWARD.replace("(", r"\(").replace(")", r"\)")):
        loss.backward()


@each([pair for pair in FIRST if pair[0].outputs])
def test_what_out_wrote_says_that_there_is_no_backward(op, sample):
    """Memory that every step writes does not hold the graphs of all former steps."""
    (first, *rest), kwargs = sample.make(CPU)
    outputs = outputs_for(op, (first, *rest), kwargs)
    with torch.enable_grad():
        for _ in range(2):
            packet(op).out(first.clone().requires_grad_(), *rest, **kwargs, **outputs)
            for written in outputs.values():
                assert written.grad_fn.next_functions[0][0] is None, "the step before it is still held"
        for written in outputs.values():
            with pytest.raises(RuntimeError, match=re.escape(f"{op.name} {BACKWARD}")):
                written.float().sum().backward()
        packet(op).out(first, *rest, **kwargs, **outputs)
        assert not any(written.requires_grad for written in outputs.values()), "the history of what was overwritten"
        with torch.inference_mode():
            apart = outputs_for(op, (first, *rest), kwargs)
        parts = {name: torch.stack((made, made)).unbind()[1] for name, made in apart.items()}
        for outputs in (apart, parts):  # to which torch allows no writes in a graph
            packet(op).out(first.clone().requires_grad_(), *rest, **kwargs, **outputs)
            assert not any(written.requires_grad or written.isnan().any() for written in outputs.values())


@pytest.mark.parametrize("arch", [None, "gfx942", "gfx950"])
@each([pair for pair in SAMPLES if pair[0].mutates or pair[0].outputs], FIRST)
def test_a_write_counts_as_a_new_version(op, sample, arch):
    """On every backend, the first time and on the fast path: autograd raises where it saved what was overwritten."""
    args, kwargs = sample.make(CPU)
    outputs = outputs_for(op, args, kwargs)
    written = [*outputs.values(), *(args[position] for position in op.functional.known.mutated)]
    with mla_suite.emulate(arch) if arch else contextlib.nullcontext():
        for _ in range(3):
            before = [tensor._version for tensor in written]
            if op.outputs:
                packet(op).out(*args, **kwargs, **outputs)
            else:
                getattr(mla_suite, op.name)(*args, **kwargs)
            assert all(tensor._version > old for tensor, old in zip(written, before, strict=True))


@pytest.mark.parametrize("arch", [None, "gfx942"])
def test_a_cache_that_autograd_saved_may_not_be_overwritten(arch):
    op = register.get("append_kv")
    (kv_c, k_pe, kv_cache, *rest), kwargs = op.samples()[0].make(CPU)
    weight = torch.ones(kv_cache.shape[-1], dtype=kv_cache.dtype, requires_grad=True)
    product = (weight * kv_cache).sum()
    with mla_suite.emulate(arch) if arch else contextlib.nullcontext():
        mla_suite.append_kv(kv_c, k_pe, kv_cache, *rest, **kwargs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@each(SAMPLES)
def test_samples_make_fresh_arguments_and_know_their_cost(op, sample):
    one, other = sample.make(CPU), sample.make(CPU)
    assert same(one, other)
    assert not {t.data_ptr() for t in tensors(one)} & {t.data_ptr() for t in tensors(other) if t.numel()}
    assert sample.bytes > 0
    assert sample.flops >= 0


@pytest.mark.parametrize("op", register.registry().values(), ids=register.registry())
def test_record_matches_torch(op):
    assert packet(op).default._schema == torch._C.parse_schema(op.qualname + op.functional.schema)
    names = [sample.name for sample in op.samples()]
    assert len(set(names)) == len(names) > 0
    for overload in packet(op).overloads():
        tags = getattr(packet(op), overload).tags
        assert {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag} <= set(tags)
    more = {"sparse_decode": ["max_logits"]}.get(op.name, [])
    assert packet(op).overloads() == [*(["default", "out"] if op.outputs else ["default"]), *more]
    assert op.backends[-1].name == "reference"
    assert op.validate is not None, "on a CPU, and in debug mode, the values of indices are checked"
    for name in op.outputs:
        argument = next(a for a in packet(op).out._schema.arguments if a.name == name)
        assert argument.alias_info.is_write


def test_an_operator_is_registered_once():
    with pytest.raises(ValueError, match="operator combine is already registered"):
        register.register(register.get("combine"))


TRANSFORMS = {
    "grad": lambda loss, x: torch.func.grad(loss)(x),
    "vjp": lambda loss, x: torch.func.vjp(loss, x),
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (torch.ones_like(x),)),
    "grad of each": lambda loss, x: torch.vmap(torch.func.grad(loss))(x[None]),
    "grad of a vmap": lambda loss, x: torch.func.grad(lambda y: torch.vmap(loss)(y[None]).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each([pair for pair in FIRST if pair[0].outputs])
def test_torch_func_says_that_there_is_no_backward(op, sample, transform):
    args, kwargs = sample.make(CPU)

    def loss(call, x):
        return sum(result.float().sum() for result in call(x, *args[1:], **kwargs))

    def written(*tensors, **options):
        outputs = outputs_for(op, args, kwargs)
        packet(op).out(*tensors, **options, **outputs)
        return tuple(outputs.values())

    names = {packet(op): op.name, getattr(mla_suite, op.name): op.name, written: f"{op.name}.out"}
    for call, name in names.items():
        with pytest.raises(RuntimeError) as refused:
            TRANSFORMS[transform](partial(loss, call), args[0])
        assert str(refused.value) == f"{name} {BACKWARD}"
    constant = torch.func.grad(lambda x: loss(packet(op), x.detach()) + x.float().sum())(args[0])
    assert torch.equal(constant, torch.ones_like(constant)), "a detached input is a constant"


@each([pair for pair in FIRST if pair[0].outputs])
def test_tangents_are_dropped_by_every_call(op, sample):
    """By the first call, which prepares the ones like it, and by those."""
    args, kwargs = sample.make(CPU)
    for call in (packet(op), getattr(mla_suite, op.name)):
        for _ in range(3):
            with forward_ad.dual_level():
                results = call(forward_ad.make_dual(args[0], torch.ones_like(args[0])), *args[1:], **kwargs)
                assert all(forward_ad.unpack_dual(result).tangent is None for result in results)

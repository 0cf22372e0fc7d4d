"""A stand-in for a CUDA device: it holds CPU memory, and keeps to CUDA's rules.

    with stand_in.machine() as gpu:
        model.to("cuda")
        ...
        print(gpu.kernels, gpu.waits, gpu.attention)

Every tensor stays an ordinary CPU tensor. Where it lives is written on its memory
(`storage.place`), so that its views, its gradient and whatever autograd has saved of it agree.
Two of torch's own modes look on:
- `Requests` sees what Python asks for by name: `x.to("cuda")`, `x.tolist()`, an attention kernel.
- `Kernels` sees every operation that follows, those of a backward pass too. It raises where
  devices mix, counts what makes the host wait, and writes down on a tape what runs while a graph
  is captured.

Attention is computed by its formula, and comes back in the layout of the kernel that CUDA would
have chosen. A capture changes nothing, as on CUDA; a replay runs the tape on the memory that the
capture saw, with garbage in what other graphs of the same pool may have used. A copy that does not
block is done when something waits: until then the host may neither read what arrives nor write
over what leaves, and what arrives is garbage.

Not seen: speed, CUDA's own rounding, how much memory is used, races between two streams.
"""
import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

import sample

CUDA = torch.device("cuda:0")
HALF = (torch.float16, torch.bfloat16)

# Names of operations, as torch's dispatcher knows them.
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}         # the only ones that may cross devices
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive",
         "unique_dim", "bincount", "equal"}              # the host needs the result, or its size
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
TAKES_SCALARS = INDEXING | {"fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_",
                            "where"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class CudaError(RuntimeError):
    """What CUDA, or torch on CUDA, would refuse."""


def written_by(func, args, kwargs):
    """The tensors that an operation writes to."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    return [x for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tensors_in(given.get(argument.name))]


def overlap(a, b):
    """Whether two tensors share memory: others may lie in the same storage."""
    def span(x):
        first = x.storage_offset() * x.element_size()
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
        return first, first + (last + 1) * x.element_size()

    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not a.numel() * b.numel():
        return False
    (start, end), (other, other_end) = span(a), span(b)
    return start < other_end and other < end


@dataclass
class Copy:
    """One copy between host and GPU."""

    to_host: bool
    elements: int
    pinned: bool
    blocking: bool


# --------------------------------------------------------------------------------------------------
# Where memory lives: "host", "pinned" (host memory that the GPU reads by itself), "gpu"; or
# "either", for what torch's C++ made without being told where: whoever uses it first owns it.

device_of = torch._C.TensorBase.device.__get__           # as torch's C++ sees it


def place(tensor):
    return getattr(tensor.untyped_storage(), "place", "host")


def put(tensor, where):
    tensor.untyped_storage().place = where
    return tensor


def on_gpu(tensor):
    return place(tensor) == "gpu"


def is_cuda(device):
    return torch.device(device).type == "cuda"


def tensors_in(*values):
    """The tensors among the arguments or results of an operation, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
    return found


def fresh_in(out, tensors):
    """The tensors of `out` that are no views of any in `tensors`."""
    known = {x.untyped_storage()._cdata for x in tensors}
    return [x for x in tensors_in(out) if x.untyped_storage()._cdata not in known]


def spoil(tensor):
    """Fill with garbage that shows in whatever is computed from it."""
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


# --------------------------------------------------------------------------------------------------
# The device

class Gpu:
    """What it has done so far, and `launch`, through which every operation goes."""

    def __init__(self, hopper):
        self.hopper = hopper             # torch 2.11 prefers cuDNN's attention there
        self.kernels = 0
        self.attention = Counter()       # calls, by the kernel that was chosen
        self.waits = Counter()           # of the host for the GPU, by operation
        self.copies = []
        self.in_flight = []              # of copies that nobody has waited for: (host's tensor,
                                         # the value that will arrive there, or None if it leaves)
        self.graphs = []                 # all that were captured
        self.replays = 0
        self.stream = Stream(self)       # the current one
        self.replayed = None             # the last graph that was
        self.capturing = None            # the graph that is being captured
        self.inside_kernel = False       # operations are parts of one fused kernel
        self.asked = False               # Python named a device, or made a tensor from nothing
        self.own_numbers = False         # Python gave a generator of the GPU's

    @contextlib.contextmanager
    def state(self, **values):
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def launch(self, func, args, kwargs):
        name = func._schema.name.removeprefix("aten::")
        if name == "record_stream":
            return None
        tensors = tensors_in(*args, *kwargs.values())
        places = {place(x) for x in tensors}
        where = self.destination(name, places, args, kwargs)
        if where != "gpu" and "gpu" not in places:
            self.check_host(func, tensors, args, kwargs)
            out = func(*args, **kwargs)
            if where != "host":
                for x in tensors_in(out):
                    put(x, where)
            return out

        arrives_later = self.check(func, name, tensors, places, where, args, kwargs)
        out = self.capturing.record(func, args, kwargs) if self.capturing else func(*args, **kwargs)
        fresh = fresh_in(out, tensors)
        for x in fresh:
            put(x, where)
        if name in ALLOCATIONS:
            for x in fresh:
                spoil(x)                                 # nobody has written to it yet
        elif fresh or func._schema.is_mutable:
            self.kernels += not self.inside_kernel
        if arrives_later:
            for x in fresh or tensors_in(args[0]):
                self.in_flight.append((x, x.clone()))
                spoil(x)
        return out

    def check_host(self, func, tensors, args, kwargs):
        """Raise what torch would raise for the host alone, or where it would race with a copy."""
        if kwargs.get("generator") is not None and self.own_numbers:
            raise CudaError("Expected a 'cpu' generator but found 'cuda'")
        if not self.in_flight or func.is_view:
            return
        written = written_by(func, args, kwargs)
        for x in tensors:
            for there, value in self.in_flight:
                writes = any(x is y for y in written)
                if (writes or value is not None) and overlap(x, there):
                    raise CudaError(f"{func}: {'writes' if writes else 'reads'} memory of a copy "
                                    "that nobody has waited for")

    def destination(self, name, places, args, kwargs):
        """Where the result will live; `kwargs` lose what only CUDA understands."""
        if "gpu" in places:
            inherited = "gpu"
        else:
            inherited = "either" if places == {"either"} else "host"
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if name in ("copy_", "_foreach_copy_"):
            return place(tensors_in(args[0])[0])
        if device is None:
            return inherited
        if is_cuda(device):
            kwargs["device"] = torch.device("cpu")
            return "gpu"
        if self.asked:
            return "pinned" if pinned else "host"
        return inherited if places else "either"

    def check(self, func, name, tensors, places, where, args, kwargs):
        """Raise what CUDA would raise, count waits -> does the copy arrive at the host later?"""
        strangers = []
        if places != {"gpu"}:
            for x in tensors:
                if place(x) == "either":
                    put(x, "gpu")
            strangers = [x for x in tensors if not on_gpu(x)]
        if name in COPIES and (strangers or where != "gpu"):
            pinned = bool(strangers) and all(place(x) == "pinned" for x in strangers)
            non_blocking = kwargs.get("non_blocking") or True in args[2:]
            elements = sum(x.numel() for x in tensors_in(args[0]))
            pinned = pinned or name == "_to_copy" and where != "gpu" and bool(non_blocking)
            copy = Copy(where != "gpu", elements, pinned, not (pinned and non_blocking))
            self.copies.append(copy)
            if copy.blocking:
                self.wait(name)
            elif not copy.to_host:
                self.in_flight += [(x, None) for x in strangers]
            return copy.to_host and not copy.blocking

        indices = tensors_in(args[1]) if name in INDEXING else []
        masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        if "put" in name and masks:
            masks = args[2].numel() > 1                  # x[mask] = number is a masked_fill
        counts = (func is torch.ops.aten.repeat_interleave.Tensor
                  and kwargs.get("output_size") is None)
        if name in WAITS or masks or counts or not all(map(on_gpu, indices)):
            self.wait(name)
        for x in strangers:
            scalar = torch.Tag.pointwise in func.tags or name in TAKES_SCALARS
            index = any(x is index for index in indices)     # is copied, hence the wait above
            written = any(x is y for y in written_by(func, args, kwargs))
            if not (scalar and x.dim() == 0 and not written) and not index:
                shapes = ", ".join(f"{tuple(y.shape)} {place(y)}" for y in tensors[:4])
                raise CudaError(f"Expected all tensors to be on the same device: {func}, {shapes}")
        generator = kwargs.get("generator")
        if generator is not None and not self.own_numbers:
            raise CudaError(f"Expected a 'cuda' generator but found '{generator.device}'")
        return False

    def wait(self, name):
        """The host stands still until the GPU is done."""
        if self.capturing:
            raise CudaError(f"operation not permitted when stream is capturing: {name}")
        self.waits[name] += 1
        with unseen():
            for target, value in self.in_flight:
                if value is not None:
                    target.copy_(value)
        self.in_flight = []


class Kernels(TorchDispatchMode):
    """Every operation, also of a backward pass."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():            # `Requests` has had its say
            return self.gpu.launch(func, args, dict(kwargs or {}))


@contextlib.contextmanager
def unseen():
    """Nothing is checked, counted or written down."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


# --------------------------------------------------------------------------------------------------
# Graphs

class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.tape = []                   # (operation, its arguments, the memory that it fills)
        self.before = []                 # (memory, what it held before the capture wrote to it)
        self.kernels = 0

    def pool(self):
        return self.handle

    def reset(self):
        self.tape = []

    def record(self, func, args, kwargs):
        self.before += [(same_memory(x), x.clone()) for x in written_by(func, args, kwargs)]
        out = func(*args, **kwargs)
        fresh = fresh_in(out, tensors_in(args, *kwargs.values()))
        if fresh or func._schema.is_mutable:
            given = tree_map(same_memory, args), tree_map(same_memory, kwargs)
            made = [(i, x) for i, x in enumerate(tensors_in(out)) if any(x is y for y in fresh)]
            self.tape.append((func, *given, made))
        return out

    def replay(self):
        gpu = self.gpu
        gpu.replays += 1
        with unseen():
            if gpu.replayed is not self:
                for graph in gpu.graphs:
                    if graph is not self and graph.handle is self.handle:
                        for _, x in (entry for step in graph.tape for entry in step[-1]):
                            spoil(x)
            for func, args, kwargs, made in self.tape:
                out = tensors_in(func(*args, **kwargs))
                for i, x in made:
                    x.copy_(out[i])
        gpu.replayed = self


def same_memory(x):
    """A graph knows addresses: a parameter that is given other memory leaves its graphs behind."""
    return x.detach() if isinstance(x, torch.Tensor) else x


@contextlib.contextmanager
def capture(gpu, graph, pool=None, stream=None, capture_error_mode="global"):
    """Stands for torch.cuda.graph."""
    before, gpu.stream = gpu.stream, stream
    graph.stream = stream
    graph.handle = object() if pool is None else pool
    gpu.graphs.append(graph)
    kernels = gpu.kernels
    try:
        with gpu.state(capturing=graph):
            yield
        gpu.stream = before                              # after an error torch leaves it as it is
    finally:
        graph.kernels = gpu.kernels - kernels
        with unseen():
            for x, value in reversed(graph.before):
                x.copy_(value)


# --------------------------------------------------------------------------------------------------
# Attention, by its formula

def attend(gpu, kernel, q, k, v, bias, scale):
    """softmax(q k' scale + bias) v in float32, or in float64 where that is given.

    q (..., Hq, S, D), k and v (..., Hkv, K, D), bias (..., S, K) or None -> (..., Hq, S, D)
    """
    gpu.attention[kernel] += 1
    gpu.kernels += 1
    with gpu.state(inside_kernel=True):
        shared = q.shape[-3] // k.shape[-3]
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.to(wide).repeat_interleave(shared, dim=-3) for x in (k, v))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = q.to(wide) @ k.mT * scale
        if bias is not None:
            scores = scores + bias
        weights = torch.ops.aten._safe_softmax(scores, -1)   # 0 where a query sees no key
        return (weights @ v).to(q.dtype)


def sdpa(gpu, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
         enable_gqa=False):
    """scaled_dot_product_attention (B, H, S, D), its kernel chosen as torch 2.11 does on Ampere
    and newer."""
    half = q.dtype in HALF
    S, K = q.shape[2], k.shape[2]
    if gpu.hopper and half and K > 1 and torch.backends.cuda.cudnn_sdp_enabled():
        kernel = "cudnn"
    elif half and attn_mask is None and (S == K or not is_causal):
        kernel = "flash"
    else:
        kernel = "efficient"

    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:    # a kernel of its own at every call
        bias = torch.where(bias, 0.0, torch.full((), -math.inf, dtype=q.dtype, device=CUDA))
    if bias is not None and bias.dtype != q.dtype:
        raise CudaError(f"invalid dtype for bias: {bias.dtype} with a query of {q.dtype}")
    if is_causal:
        with gpu.state(inside_kernel=True):
            bias = torch.full((S, K), -math.inf, device=CUDA).triu(1)    # upper left
    out = attend(gpu, kernel, q, k, v, bias, scale)
    with gpu.state(inside_kernel=True):
        if kernel == "efficient":                        # (B, S, H, D) in memory
            return out.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.empty_like(q).copy_(out)            # flash and cuDNN: as the query lies


def ragged(gpu, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, used=None, block_table=None):
    """Flash attention over sequences that stand one behind another: q (T, Hq, D), k and v
    (K, Hkv, D). Sequence i has the queries cu_q[i]:cu_q[i+1] and the first used[i] of the keys
    cu_k[i]:cu_k[i+1]."""
    if q.dtype not in HALF or cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise CudaError(f"flash attention: {q.dtype}, with lengths in {cu_q.dtype}, {cu_k.dtype}")
    if block_table is not None:
        raise NotImplementedError("the stand-in has no pages of keys")
    with gpu.state(inside_kernel=True):
        used = cu_k.diff() if used is None else used     # (sequences,)
        i, t = whose(cu_q, len(q))                       # (T,)
        j, s = whose(cu_k, len(k))                       # (K,)
        seen = (i[:, None] == j) & (s < used[j])         # (T, K)
        if causal:                                       # the last query sees the last key
            seen &= s <= (t + used[i] - cu_q.diff()[i])[:, None]
        seen &= (t < max_q)[:, None] & (s < max_k)       # a length that is too small cuts
        bias = torch.where(seen, 0.0, -math.inf)
        unread = ~seen.any(dim=0)[:, None, None]         # whatever stands there
        k, v = k.masked_fill(unread, 0), v.masked_fill(unread, 0)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))     # (H, T or K, D)
    return attend(gpu, "ragged", q, k, v, bias, scale).transpose(0, 1).contiguous()


def whose(starts, length):
    """Each token's sequence, and its index in that; a token behind the last sequence has none."""
    token = torch.arange(length, device=CUDA)
    sequence = torch.searchsorted(starts, token, right=True).clamp(max=len(starts) - 1) - 1
    index = token - starts[sequence]
    return sequence, index.masked_fill(token >= starts[-1], 2**31 - 1)


def flash_forward(gpu, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
                  seqused_k=None, block_table=None, **_):
    """torch.ops.aten._flash_attention_forward"""
    out = ragged(gpu, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, seqused_k, block_table)
    return out, None, None, None, None


def varlen_forward(gpu, q, k, v, cu_q, cu_k, max_q, max_k, causal=False, scale=None, *rest):
    """torch.ops.torch_attn._varlen_attn, whose last arguments differ between versions of torch."""
    more = tensors_in(*rest)                             # seqused_k, block_table
    return ragged(gpu, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, *more), None, None


# --------------------------------------------------------------------------------------------------
# What Python asks for by name

class Requests(TorchFunctionMode):
    """Answers that differ from the CPU's; all else is passed on."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        gpu, kwargs = self.gpu, kwargs or {}
        if func in MADE_FROM_DATA:
            return from_data(gpu, func, *args, **kwargs)
        if func in ANSWERS and (func in HOST_TOO or on_gpu(args[0])):
            return ANSWERS[func](gpu, *args, **kwargs)
        before = gpu.asked, gpu.own_numbers              # `state` would take longer than most calls
        gpu.asked = "device" in kwargs or not tensors_in(*args)
        gpu.own_numbers = isinstance(kwargs.get("generator"), Generator)
        try:
            return func(*args, **kwargs)
        finally:
            gpu.asked, gpu.own_numbers = before


def from_data(gpu, func, *args, device=None, **kwargs):
    """torch.tensor(numbers, device="cuda") is made on the host and copied; x.new_tensor(numbers)
    goes where x is."""
    if func is torch.Tensor.new_tensor:
        like, *args = args
        device = device or ("cuda" if on_gpu(like) else "cpu")
        kwargs.setdefault("dtype", like.dtype)
        func = torch.tensor
    with gpu.state(asked=True):
        made = func(*args, **kwargs)
    return made if device is None else move(gpu, made, device)


def move(gpu, x, *args, copy=False, **kwargs):
    """Tensor.to"""
    if args and isinstance(args[0], torch.Tensor):
        args = ("cuda" if on_gpu(args[0]) else "cpu", args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type in ("cpu", "cuda"):
        if is_cuda(device) != on_gpu(x):
            with gpu.state(asked=True):
                return torch.ops.aten._to_copy(x, device=device, dtype=dtype,
                                               non_blocking=non_blocking)
        device = None                                    # it is there already
    return x.to(device, dtype, copy=copy, memory_format=layout or torch.preserve_format)


def to_list(gpu, x):
    gpu.wait("tolist")
    return x.tolist()


def to_numpy(gpu, x, **_):
    raise TypeError("can't convert a cuda:0 tensor to numpy. Use Tensor.cpu() first.")


def pin(gpu, x, *_):
    if on_gpu(x):
        raise CudaError("cannot pin a tensor of cuda:0: only dense CPU tensors can be pinned")
    with unseen():
        return put(x.clone(), "pinned")


def set_grad(gpu, x, grad):
    """x.grad = grad"""
    if grad is not None:
        check_grad(x, grad)
    with torch._C.DisableTorchFunction():
        x.grad = grad


def get_grad(gpu, x):
    """x.grad, also of what a backward pass of the user's own has given it."""
    with torch._C.DisableTorchFunction():
        grad = x.grad
    if grad is not None:
        check_grad(x, grad)
    return grad


def check_grad(x, grad):
    for a, b in ((x, grad), (grad, x)):
        if place(a) == "either" and on_gpu(b):
            put(a, "gpu")
    if on_gpu(x) != on_gpu(grad):
        raise CudaError(f"attempting to assign a gradient of {place(grad)} to a tensor of "
                        f"{place(x)}: both must be on the same device")


def deep_copy(gpu, x, memo):
    with unseen():
        return put(torch.Tensor.__deepcopy__(x, memo), "gpu")


def fused_norm(gpu, x, *args, **kwargs):
    gpu.kernels += 1
    with gpu.state(inside_kernel=True):
        return torch.rms_norm(x, *args, **kwargs)


def product(gpu, a, b, out_dtype=None):
    """torch.mm: the result has the factors' dtype, or float32 where that is asked for."""
    if out_dtype is None:
        return torch.mm(a, b)
    if a.dtype != b.dtype or out_dtype not in (a.dtype, torch.float32):
        raise CudaError(f"torch.mm: {a.dtype} and {b.dtype} into {out_dtype}")
    gpu.kernels += 1
    with gpu.state(inside_kernel=True):
        return torch.mm(a.to(out_dtype), b.to(out_dtype))


MADE_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
HOST_TOO = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.is_pinned,
            torch.Tensor.grad.__set__, torch.Tensor.grad.__get__}
ANSWERS = {
    torch.Tensor.to: move,
    torch.Tensor.cpu: lambda gpu, x, **kwargs: move(gpu, x, "cpu", **kwargs),
    torch.Tensor.cuda: lambda gpu, x, *_, **kwargs: move(gpu, x, "cuda", **kwargs),
    torch.Tensor.pin_memory: pin,
    torch.Tensor.is_pinned: lambda gpu, x, *_: place(x) == "pinned",
    torch.Tensor.get_device: lambda gpu, x: 0,
    torch.Tensor.grad.__set__: set_grad,
    torch.Tensor.grad.__get__: get_grad,
    torch.Tensor.tolist: to_list,
    torch.Tensor.numpy: to_numpy,
    torch.Tensor.__deepcopy__: deep_copy,
    torch.mm: product,
    scaled_dot_product_attention: sdpa,
    rms_norm: fused_norm,
    torch.rms_norm: fused_norm,
    torch.ops.aten._flash_attention_forward: flash_forward,
    torch.ops.aten._flash_attention_forward.default: flash_forward,
    torch.ops.torch_attn._varlen_attn: varlen_forward,
    torch.ops.torch_attn._varlen_attn.default: varlen_forward,
}


# --------------------------------------------------------------------------------------------------
# The machine around it

class Stream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: all runs in the order it was asked for."""

    def __init__(self, gpu):
        self.gpu = gpu

    def synchronize(self):
        self.gpu.wait("synchronize")

    def ignored(self, *_):
        return self

    wait_stream = wait_event = record_event = record = wait = ignored


class Generator(torch.Generator):
    """Stands for torch.Generator("cuda"): other numbers than CUDA's."""

    device = CUDA


@contextlib.contextmanager
def machine(hopper=False):
    """Here is a GPU: an Ada card of 24 GB, or a Hopper of 141 GB."""
    gpu = Gpu(hopper)
    size = int((141 if hopper else 24) * 1e9)
    capability = (9, 0) if hopper else (8, 9)
    card = SimpleNamespace(name="stand-in", major=capability[0], minor=capability[1],
                           total_memory=size, multi_processor_count=132)
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: card,
        "get_device_name": lambda *_: card.name,
        "mem_get_info": lambda *_: (size, size),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: gpu.wait("synchronize"),
        "Stream": lambda *_, **__: Stream(gpu),
        "Event": lambda *_, **__: Stream(gpu),
        "current_stream": lambda *_: gpu.stream,
        "stream": lambda stream: gpu.state(stream=stream),
        "CUDAGraph": lambda *_, **__: Graph(gpu),
        "graph": lambda graph, **kwargs: capture(gpu, graph, **kwargs),
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }
    tensor = {
        "device": property(lambda x: CUDA if on_gpu(x) else device_of(x)),
        "is_cuda": property(on_gpu),
        "is_cpu": property(lambda x: not on_gpu(x) and device_of(x).type == "cpu"),
    }
    run_backward = torch.autograd._engine_run_backward
    group = torch._C._group_tensors_by_device_and_dtype

    def backward(tensors, gradients, *args, **kwargs):
        """torch puts function modes aside in there, but hooks and checkpoints ask too."""
        for x, grad in zip(tensors, gradients):
            if isinstance(grad, torch.Tensor):
                check_grad(x, grad)
        with Requests(gpu):
            return run_backward(tensors, gradients, *args, **kwargs)

    def grouped(lists, *args):
        """What optimizers and clipping ask C++ for: {(device, dtype): (lists, indices)}."""
        groups = {}
        for (device, dtype), (tensors, indices) in group(lists, *args).items():
            groups[CUDA if on_gpu(tensors[0][0]) else device, dtype] = (tensors, indices)
        return groups

    host = torch.Generator

    def generator(device="cpu"):
        return Generator() if is_cuda(device) else host(device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, create=True, **cuda))
        stack.enter_context(patch.multiple(torch.Tensor, create=True, **tensor))
        stack.enter_context(patch.object(torch, "Generator", generator))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", backward))
        stack.enter_context(patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped))
        stack.enter_context(Kernels(gpu))
        stack.enter_context(Requests(gpu))
        sample.flash_works.cache_clear()  # what a CPU or another card has answered is forgotten
        stack.callback(sample.flash_works.cache_clear)
        yield gpu

"""The group of ranks on GPUs: PyTorch's NCCL process group behind `Group`, and a detour through the host without it.

NCCL needs one device a rank. `StagedGroup` serves the rest (ranks that share a GPU, builds without NCCL): it copies to
the host, exchanges there, and copies back. The ranks meet in a store whose socket is opened here, on one address, and
handed over: by itself it would listen on all interfaces. NCCL's own connections and that store know no key: GPU groups
across nodes belong on a private network. Sums have the same bits on all ranks, in an order that NCCL chooses.

Exchanges are queued on the device; a wait happens where the result is read. The first error of a peer is seen by
whoever started it, and told through the `Abort`, which breaks the communicator.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from phalanx.distributed.collectives import Group
from phalanx.distributed.transports.abort import Abort, GroupBroken

_NEVER = timedelta(days=1)


class TorchGroup:
    """`backend` is a connected process group of torch.distributed; `control`, where given, belongs to it and is
    closed with it. Starts a thread, which breaks the backend on abort."""

    def __init__(self, backend: Any, ranks: Sequence[int], abort: Abort, control: Group | None = None):
        self.rank, self.size = backend.rank(), backend.size()
        self._backend, self._ranks, self._abort, self._control = backend, tuple(ranks), abort, control
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._watch = threading.Thread(target=self._watch_abort, name="group abort", daemon=True)
        self._watch.start()

    def describe(self) -> dict[str, Any]:
        return {"transport": str(self._backend.name())}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place where `tensor` is contiguous."""
        out = tensor.contiguous()
        self._finish(self._backend.allreduce([out]))
        return out

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        mine = tensor.movedim(dim, 0).contiguous()
        most = max(lengths)
        padded = _padded(mine, most)
        whole = padded.new_empty([self.size * most, *padded.shape[1:]])
        self._finish(self._backend._allgather_base(whole, padded))
        if min(lengths) < most:
            whole = torch.cat([whole[r * most : r * most + n] for r, n in enumerate(lengths)])
        return whole.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        pieces = torch.split(tensor.movedim(dim, 0), list(lengths))
        most = max(lengths)
        outgoing = torch.cat([_padded(piece, most) for piece in pieces])
        out = torch.empty_like(outgoing[:most])
        self._finish(self._backend._reduce_scatter_base(out, outgoing))
        return out[: lengths[self.rank]].movedim(0, dim).contiguous()

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        outgoing = torch.cat([tensor.reshape(-1) for tensor in tensors])
        counts = [torch.Size(shape).numel() for shape in shapes]
        out = outgoing.new_empty(sum(counts))
        self._finish(self._backend.alltoall_base(out, outgoing, counts, [tensor.numel() for tensor in tensors]))
        return [part.view(shape) for part, shape in zip(torch.split(out, counts), shapes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        mine = self.rank == source
        out = tensor.contiguous() if mine else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._finish(self._backend.broadcast(out, source))
        return out

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._finish(self._backend.send([tensor.contiguous()], to, 0))

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._device)
        self._finish(self._backend.recv([out], source, 0))
        return out

    def barrier(self) -> None:
        self._finish(self._backend.barrier())

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def join_round(self) -> None:
        return None

    _device = torch.device("cpu")

    def _finish(self, work: Any) -> None:
        self._abort.check()
        self._abort.pulse.count += 1
        try:
            work.wait()
        except RuntimeError as error:
            self._abort.check()
            reason = str(error).partition("\n")[0]
            raise GroupBroken(f"Rank {self._ranks[self.rank]}'s exchange failed: {reason}.") from None

    def _watch_abort(self) -> None:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.register(self._abort.fileno(), select.POLLIN)
        if not any(fd == self._end for fd, _ in poll.poll()):
            with contextlib.suppress(RuntimeError):
                self._backend.abort()

    def close(self) -> None:
        """Idempotent."""
        if self._end < 0:
            return
        os.eventfd_write(self._end, 1)
        self._watch.join()
        os.close(self._end)
        self._end = -1
        with contextlib.suppress(RuntimeError):  # it may be broken already
            self._backend.abort()
        if self._control is not None and hasattr(self._control, "close"):
            self._control.close()


class NcclGroup(TorchGroup):
    """Built by `connect_nccl`."""

    def __init__(self, backend: Any, ranks: Sequence[int], abort: Abort, control: Group, device: torch.device):
        self._device = device
        super().__init__(backend, ranks, abort, control)


class StagedGroup:
    """Tensors of a device, exchanged by the host group `control`, which belongs to it."""

    def __init__(self, control: Group, device: torch.device):
        self.rank, self.size = control.rank, control.size
        self._control, self._device = control, device

    def describe(self) -> dict[str, Any]:
        return {**self._control.describe(), "device": str(self._device)}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._back(self._control.all_reduce(tensor.cpu()))

    def all_gather(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return self._back(self._control.all_gather(tensor.cpu(), dim, lengths))

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return self._back(self._control.reduce_scatter(tensor.cpu(), dim, lengths))

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return [self._back(part) for part in self._control.all_to_all([tensor.cpu() for tensor in tensors], shapes)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self._back(self._control.broadcast(tensor.cpu(), source))

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._control.send(tensor.cpu(), to)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        return self._back(self._control.recv(shape, dtype, source))

    def barrier(self) -> None:
        self._control.barrier()

    def rounds(self, dtype: torch.dtype) -> None:
        return None

    def join_round(self) -> None:
        return None

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def close(self) -> None:
        if hasattr(self._control, "close"):
            self._control.close()


def connect_nccl(
    control: Group, ranks: Sequence[int], device: torch.device, host: str, abort: Abort, timeout: float | None
) -> NcclGroup:
    """Made by all members at once. `control` is the members' group on their hosts; `host` is the first member's address
    for the others. Raises GroupBroken when NCCL cannot connect them."""
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        limit = _NEVER if timeout is None else timedelta(seconds=timeout)
        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        store = meet_in_store(control, host, limit)
        backend = ProcessGroupNCCL(store, control.rank, control.size, options)
        backend.eager_connect_single_device(device)
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise GroupBroken(f"Rank {ranks[control.rank]} cannot join the others' GPUs: {reason}.") from None
    return NcclGroup(backend, ranks, abort, control, device)


def meet_in_store(control: Group, host: str, timeout: timedelta) -> Store:
    """A store of torch.distributed that listens on `host` only; its port travels over `control`."""
    port = torch.zeros(1, dtype=torch.int64)
    fd = None
    if control.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=control.size)
        port[0] = listener.getsockname()[1]
        fd = listener.detach()
    first = control.rank == 0
    number = int(control.broadcast(port, 0))
    store = TCPStore(host, number, control.size, first, timeout, wait_for_workers=False, master_listen_fd=fd)
    control.barrier()
    return store


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Zeros behind it, up to `length` along the first dimension."""
    if tensor.shape[0] == length:
        return tensor.contiguous()
    out = tensor.new_zeros([length, *tensor.shape[1:]])
    out[: tensor.shape[0]] = tensor
    return out

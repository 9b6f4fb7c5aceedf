"""torch's private registry of process groups: remember how each was made, close it, make it again under its name.

torch keeps groups in tables of ``torch.distributed.distributed_c10d`` (torch 2.3 on) and, by name, in C++
(``_register_process_group``). Meshes, DTensors and compiled code look groups up by name, so a group that is made
again under its old name is found by all of them. A test in ``tests/unit/test_private_names_restart.py`` fails when a
name used here moves.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_resilience._torch import cuda_in_use, parameter_groups

__all__ = ["PrefixStore", "Store", "TCPStore"]

Groups = Mapping[dist.ProcessGroup, dist.ProcessGroup]
"""Old groups with those that took their places."""


@dataclass(frozen=True)
class Descriptor:
    """An open socket: its number, and the inode that tells it from a later one of the same number."""

    fd: int
    inode: str

    def is_open(self) -> bool:
        """Whether the number still means this socket."""
        return _link(self.fd) == self.inode


@dataclass(frozen=True)
class GroupRecord:
    """How a group was made: the arguments of ``_new_process_group_helper``, and the sockets that came of it."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    sockets: tuple[Descriptor, ...]


_records: dict[str, GroupRecord] = {}
_protected_ports: set[int] = set()
_WATCHED = "_lightning_resilience_watched"
_NAME, _STORE = 5, 4  # positions among the arguments


def watch_groups() -> None:
    """From now on remember how groups are made. Called again it changes nothing.

    ``_new_process_group_helper`` is the one place through which ``init_process_group`` and ``new_group`` go.
    """
    original = c10d._new_process_group_helper
    if getattr(original, _WATCHED, False):
        return

    def watched(*arguments: Any, **options: Any) -> Any:
        before = set(open_sockets())
        made = original(*arguments, **options)
        name = arguments[_NAME]
        for closed in _records.keys() - set(live_names()):
            del _records[closed]
        if isinstance(made[0], dist.ProcessGroup) and c10d._world.pg_names.get(made[0]) == name:  # not one found by tag
            new = tuple(item for item in open_sockets() if item not in before)
            _records[name] = GroupRecord(arguments, options, new)
        return made

    setattr(watched, _WATCHED, True)
    c10d._new_process_group_helper = watched


def group_sockets() -> list[Descriptor]:
    """The sockets of all groups that are open."""
    names = set(c10d._world.pg_names.values())
    made = [item for name, record in _records.items() if name in names for item in record.sockets if item.is_open()]
    return [item for item in made if not {_own_port(item), peer_port(item)} & _protected_ports]


def first_store() -> Any:
    """The store through which the ranks of this job found each other."""
    return c10d._get_default_store()


def live_groups() -> list[dist.ProcessGroup]:
    """All groups this rank is in, the newest last."""
    return list(c10d._world.pg_map)


def live_names() -> list[str]:
    """Their names."""
    return list(c10d._world.pg_names.values())


def group_of_today(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The live group of the same name, which is another object once groups were made again; else the group itself."""
    world = c10d._world
    if group in world.pg_map:
        return group
    return next((live for live, name in world.pg_names.items() if name == group.group_name), group)


def device_backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group, one for each kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def protect_port(port: int) -> None:
    """Connections of this port belong to a store, whatever else is opened at the same time."""
    _protected_ports.add(port)


def cut_socket(item: Descriptor) -> bool:
    """End a connection for both sides; the descriptor stays, as it is not ours to close. Listening sockets stay too.

    Returns:
        Whether it was a connection.
    """
    with _duplicate(item) as connection:
        if connection is None or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not connected any more
            return False
        return True


def peer_port(item: Descriptor) -> int | None:
    """The port at the other end of a connection."""
    with _duplicate(item) as connection:
        return None if connection is None else _port(connection.getpeername)


def _own_port(item: Descriptor) -> int | None:
    with _duplicate(item) as connection:
        return None if connection is None else _port(connection.getsockname)


def _port(ask: Callable[[], Any]) -> int | None:
    try:
        address = ask()
    except OSError:  # not connected
        return None
    return address[1] if isinstance(address, tuple) else None  # a path: a socket of this machine


def duplicate(item: Descriptor) -> socket.socket | None:
    """The same connection under a number of its own, which nobody else can close; None if it is closed."""
    try:
        number = os.dup(item.fd)
    except OSError:  # closed in the meantime
        return None
    if not item.is_open():  # and what has the number now may be no socket
        os.close(number)
        return None
    return socket.socket(fileno=number)


@contextlib.contextmanager
def _duplicate(item: Descriptor) -> Iterator[socket.socket | None]:
    """The same for a moment."""
    copy = duplicate(item)
    with copy or contextlib.nullcontext():
        yield copy


def sockets_being_written() -> set[int]:
    """Numbers of the sockets of which gloo waits until it can send more.

    It asks for ``EPOLLOUT`` only then; see "epoll" in proc_pid_fdinfo(5).
    """
    found: set[int] = set()
    for fd, link in _links():
        if link == "anon_inode:[eventpoll]":
            found |= {int(number) for number, events in _watched_by(fd) if int(events, 16) & select.EPOLLOUT}
    return found


def _watched_by(epoll: int) -> list[tuple[str, str]]:
    try:
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed in the meantime
        return []
    return re.findall(r"^tfd:\s+(\d+)\s+events:\s+([0-9a-f]+)", text, re.MULTILINE)


class ClosedGroups:
    """The groups of this rank, about to be made again; kept until that has succeeded, however often it is tried."""

    def __init__(self) -> None:
        world = c10d._world
        self._old = {world.pg_names[group]: group for group in world.pg_map}
        self._records = {name: _records.get(name) or _derived(group) for name, group in self._old.items()}
        self._ranks = {name: dict(world.pg_group_ranks[group]) for name, group in self._old.items()}
        assert world.default_pg is not None
        self._default = world.pg_names[world.default_pg]

    @property
    def members(self) -> dict[str, list[int]]:
        """The ranks of the job in each group, by the group's name."""
        return {name: list(ranks) for name, ranks in self._ranks.items()}

    def make_again(self, store: Store, names: Collection[str]) -> dict[dist.ProcessGroup, dist.ProcessGroup]:
        """Make groups again, with their names, ranks, backends and timeouts, in their order.

        All ranks of the job call it at the same time. Raises what torch raises when a rank does not come.

        Args:
            store: A store that no group has used before.
            names: Of the groups; others are closed for good. The default group is always made.

        Returns:
            The new group for each old one that was made again.
        """
        _forget_all_groups()
        world = c10d._world
        made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        for name, group in self._old.items():
            if name not in names and name != self._default:
                continue
            made[group] = _make_again(self._records[name], store)
            if name == self._default:
                c10d._update_default_pg(made[group])
                store = world.pg_map[made[group]][1]
            world.pg_group_ranks[made[group]] = self._ranks[name]
        return made


def begin_again(store: Store, *, backend: str, rank: int, size: int, timeout: timedelta | None, device: Any) -> None:
    """Forget all groups, and make the one of all ranks anew, with other ranks than before.

    All ranks of the new world call it at the same time.

    Args:
        store: A store that no group has used before.
        backend: As for ``init_process_group``, as are all below.
        rank: Of this process.
        size: Number of ranks.
        timeout: Of collectives.
        device: Of this rank; None on a CPU.
    """
    _forget_all_groups()
    _records.clear()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)


def _forget_all_groups() -> None:
    """As ``destroy_process_group`` does, but new groups go on being numbered after the old ones."""
    world = c10d._world
    for group in reversed(list(world.pg_map)):
        group.shutdown()
    for name in list(world.pg_names.values()):
        _unregister_process_group(name)
    c10d._update_default_pg(None)
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    for table in (*tables, world.tags_to_pg, world.pg_coalesce_state):
        table.clear()


def _make_again(record: GroupRecord, store: Store) -> dist.ProcessGroup:
    arguments = list(record.arguments)
    arguments[_STORE] = store
    made, _ = c10d._new_process_group_helper(*arguments, **record.options)
    group: dist.ProcessGroup = made
    return group


def _derived(group: dist.ProcessGroup) -> GroupRecord:
    """Of a group made before `watch_groups`, or by `split_group` (torch 2.4 on): what torch's tables say of it."""
    world = c10d._world
    ranks = sorted(world.pg_group_ranks[group], key=world.pg_group_ranks[group].__getitem__)
    backend = c10d.Backend(world.pg_map[group][0])
    options = {
        "timeout": _timeout(group, backend),
        "pg_tag": world.pg_to_tag.get(group),
        "group_desc": group.group_desc,
    }
    members = [] if group is world.default_pg else ranks
    return GroupRecord((group.size(), group.rank(), members, backend, None, world.pg_names[group]), options, ())


def _timeout(group: dist.ProcessGroup, backend: c10d.Backend) -> Any:
    options: list[Any] = [getattr(one, "options", None) for one in device_backends(group)]
    known = [one._timeout for one in options if hasattr(one, "_timeout")]
    return known[0] if known else c10d._get_default_timeout(backend)


def groups_that_cannot_be_cut() -> list[str]:
    """Names of open gloo groups of which the connections are not known, as they are older than `watch_groups`."""
    unknown = [group for group, name in c10d._world.pg_names.items() if name not in _records]
    return [group.group_name for group in unknown if any("Gloo" in type(b).__name__ for b in device_backends(group))]


# --- who holds groups as objects -----------------------------------------------------------------------------


def show_new_groups(groups: Groups, meshes: Iterable[DeviceMesh], model: Module | None) -> None:
    """Let meshes and FSDP2 use the new groups.

    A mesh looks groups up by name except while compiling (``DeviceMesh._pg_registry``, torch 2.10 on); FSDP2 keeps
    them in the mesh info of its parameter groups, and in their communication objects.
    """
    for mesh in meshes:
        registry = getattr(mesh, "_pg_registry", None)
        if registry is not None:
            replace_values(registry, groups)
    for group in _parameter_groups(model):
        for owner in (group.mesh_info, group.post_forward_mesh_info, *_communicators(group)):
            replace_attributes(owner, groups)


def replace_attributes(owner: Any, groups: Groups) -> None:
    """Put the new groups into attributes of `owner` that hold old ones, also inside its lists and dictionaries."""
    if hasattr(owner, "__dict__"):
        replace_values(vars(owner), groups)


def replace_values(table: dict[Any, Any], groups: Groups) -> None:
    """The same for the values of a dictionary."""
    for key, value in list(table.items()):
        new = _replaced(value, groups)
        if new is not value:
            table[key] = new


def _replaced(value: Any, groups: Groups) -> Any:
    if isinstance(value, dist.ProcessGroup):
        return groups.get(value, value)
    if type(value) in (list, tuple) and any(isinstance(item, dist.ProcessGroup) for item in value):
        return type(value)(_replaced(item, groups) for item in value)
    if type(value) is dict and any(isinstance(item, dist.ProcessGroup) for item in value.values()):
        replace_values(value, groups)
    return value


def fsdp_meshes(model: Module | None) -> list[DeviceMesh]:
    """The meshes on which FSDP2 shards, and the whole meshes that these are parts of."""
    found = [group.mesh_info.mesh for group in _parameter_groups(model)]
    return [*found, *(root for mesh in found if (root := root_of(mesh)) is not None)]


def root_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of which `mesh` is a part: ``DeviceMesh._root_mesh`` (torch 2.10 on)."""
    root: DeviceMesh | None = getattr(mesh, "_root_mesh", None)
    return root


def _parameter_groups(model: Module | None) -> Iterator[Any]:
    for module in model.modules() if model is not None else ():
        if isinstance(module, FSDPModule):
            yield from parameter_groups(module)


def _communicators(group: Any) -> list[Any]:
    return [getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm")]


def open_sockets() -> list[Descriptor]:
    """All sockets of this process."""
    return [Descriptor(fd, link) for fd, link in _links() if link.startswith("socket:")]


def _links() -> Iterator[tuple[int, str]]:
    """What this process has open."""
    for name in os.listdir("/proc/self/fd"):
        if (link := _link(int(name))) is not None:
            yield int(name), link


def _link(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def collectives_begun() -> dict[str, int]:
    """How many collectives this process has begun in each of its groups, by name and what the group is for.

    Without groups that do not count.

    ``ProcessGroup._get_sequence_number_for_group`` (torch 1.9 on).
    """
    counts: dict[str, int] = {}
    for group in live_groups():
        with contextlib.suppress(RuntimeError):  # its backend does not count
            purpose = "" if group.group_desc in ("", "undefined") else f" ({group.group_desc})"
            counts[group.group_name + purpose] = int(cast("Any", group)._get_sequence_number_for_group())
    return counts


def flight_record() -> bytes | None:
    """What torch's flight recorder holds, as ``torchfrtrace`` reads it; None where it is not switched on.

    ``_dump_nccl_trace`` (torch 2.3 on, in builds with NCCL) and ``_dump_fr_trace`` (torch 2.9 on).
    """
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"))
    if not size.isdigit() or int(size) == 0:
        return None
    names = ("_dump_nccl_trace", "_dump_fr_trace") if cuda_in_use() else ("_dump_fr_trace",)
    dump = next((getattr(_c10d, name) for name in names if hasattr(_c10d, name)), None)
    return None if dump is None else bytes(dump())

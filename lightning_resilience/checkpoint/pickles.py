"""Looks through a pickle before anything is made of it, and refuses what only an attacker would write.

An unpickler that makes harmless classes only can still be harmed: by a length or an index that allocates all
memory, and by tuples in tuples, whose hash recurses in C until the stack ends or takes longer than anybody waits.
The scan makes no objects; it follows the stack machine with one number for each value, its weight. A tuple weighs
its length and twice what the tuples in it weigh, so depth and repetition both show.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

from lightning_resilience.errors import DamagedCheckpointError, UntrustedCheckpointError

_MAX_WEIGHT = 1 << 22  # a flat tuple of four million, or tuples 21 deep
_MAX_INTEGER = 255  # bytes


class PickleGuard:
    """One scan. ``check`` says where the pickle ends.

    Args:
        data: The bytes.
        label: What to call them in an error.

    Raises:
        DamagedCheckpointError: The pickle is malformed.
        UntrustedCheckpointError: It is made to do harm.
        pickle.UnpicklingError: It has instructions that neither plain data nor metadata need.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}  # only what weighs something
        self._numbers_given = self._memoized = 0
        self._credit = 64 * len(data) + _MAX_WEIGHT

    def check(self, start: int = 0) -> int:
        """Scan one pickle and return the position after it."""
        try:
            return self._scan(start)
        except IndexError:
            raise DamagedCheckpointError("it ends too early, or takes from an empty stack") from None

    def _scan(self, at: int) -> int:
        """The frequent instructions are handled here, the others by name; a call each would double the time."""
        data, stack, memo, marks = self._data, self._stack, self._memo, self._marks
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                if weight := stack[-1]:
                    memo[self._memoized] = weight
                self._memoized += 1
            elif code in _PUSH:
                stack.append(0)
                at += _PUSH[code]
            elif code == 0x68:  # BINGET
                stack.append(memo.get(data[at], 0))
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo.get(int.from_bytes(data[at : at + 4], "little"), 0))
                at += 4
            elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                count = code - 0x84
                self._push_tuple(stack[-count:], count)
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code in _TAKE_TWO_GIVE_ONE:
                if weight := stack.pop() + stack[-1]:
                    self._spend(weight)
                    stack[-1] = 0
            elif code == 0x62:  # BUILD
                if weight := stack.pop():
                    self._spend(weight)
            elif code in (0x8C, 0x55, 0x43, 0x8A):  # SHORT_BINUNICODE, SHORT_BINSTRING, SHORT_BINBYTES, LONG1
                at = self._skip(at + 1, data[at])
            elif code == 0x2E:  # STOP
                if self._memoized and self._numbers_given:
                    raise UntrustedCheckpointError("it numbers values in two ways, which no pickler does")
                return at
            else:
                at = _RARE.get(code, PickleGuard._refuse)(self, at)

    def _push_tuple(self, weights: list[int], count: int) -> None:
        if len(weights) < count:
            raise IndexError
        weight = 1 + count + 2 * sum(weights)
        if weight > _MAX_WEIGHT:
            raise UntrustedCheckpointError("it nests tuples without end")
        if count:
            del self._stack[-count:]
        self._stack.append(weight)

    def _skip(self, at: int, length: int) -> int:
        if length > len(self._data) - at:
            raise DamagedCheckpointError(f"it announces {length} bytes and has {max(0, len(self._data) - at)}")
        self._stack.append(0)
        return at + length

    def _take(self, count: int) -> None:
        """Values go into something else; hashing them may cost as much as they weigh, each time they are used."""
        if count > len(self._stack):
            raise IndexError
        if count:
            self._spend(sum(self._stack[-count:]))
            del self._stack[-count:]

    def _spend(self, weight: int) -> None:
        self._credit -= weight
        if self._credit < 0:
            raise UntrustedCheckpointError("it uses the same tuples over and over")

    # --- instructions that are rare enough for a call: each gets the position and returns the next ------------------

    def _refuse(self, at: int) -> int:
        raise pickle.UnpicklingError(
            f"Unsupported: instruction {self._data[at - 1]:#04x} at {at - 1} has no business there"
        )

    def _tuple_to_mark(self, at: int) -> int:
        count = len(self._stack) - self._marks.pop()
        self._push_tuple(self._stack[-count:] if count else [], count)
        return at

    def _items_to_mark(self, at: int) -> int:
        """APPENDS, SETITEMS, ADDITEMS."""
        self._take(len(self._stack) - self._marks.pop())
        return at

    def _container_to_mark(self, at: int) -> int:
        """DICT, LIST, FROZENSET."""
        self._items_to_mark(at)
        self._stack.append(0)
        return at

    def _pop_mark(self, at: int) -> int:
        del self._stack[self._marks.pop() :]
        return at

    def _take_one(self, at: int) -> int:
        """APPEND, POP."""
        self._take(1)
        return at

    def _take_two(self, at: int) -> int:
        """SETITEM."""
        self._take(2)
        return at

    def _persistent(self, at: int) -> int:
        self._take(1)
        self._stack.append(0)
        return at

    def _duplicate(self, at: int) -> int:
        self._stack.append(self._stack[-1])
        return at

    def _global(self, at: int) -> int:
        for _ in range(2):
            at = self._data.find(b"\n", at) + 1
            if at == 0:
                raise IndexError
        self._stack.append(0)
        return at

    def _put(self, at: int) -> int:
        self._remember(self._data[at])
        return at + 1

    def _long_put(self, at: int) -> int:
        index = int.from_bytes(self._data[at : at + 4], "little")
        if index > len(self._data):  # the unpickler makes a table of twice that size
            raise UntrustedCheckpointError(f"it remembers a value as number {index}")
        self._remember(index)
        return at + 4

    def _remember(self, index: int) -> None:
        self._numbers_given += 1
        self._memo[index] = self._stack[-1]

    def _skip_4(self, at: int) -> int:
        return self._skip(at + 4, int.from_bytes(self._data[at : at + 4], "little"))

    def _skip_8(self, at: int) -> int:
        return self._skip(at + 8, int.from_bytes(self._data[at : at + 8], "little"))

    def _frame(self, at: int) -> int:
        after = self._skip_8(at)
        self._stack.pop()
        if after > len(self._data):
            raise IndexError
        return at + 8

    def _protocol(self, at: int) -> int:
        return at + 1


_PUSH = {
    **dict.fromkeys((0x4E, 0x88, 0x89, 0x29, 0x7D, 0x5D, 0x8F), 0),  # None, bools, (), {}, [], set
    0x4B: 1,  # BININT1
    0x4D: 2,  # BININT2
    0x4A: 4,  # BININT
    0x47: 8,  # BINFLOAT
}
_TAKE_TWO_GIVE_ONE = frozenset((0x52, 0x81, 0x93))  # REDUCE, NEWOBJ, STACK_GLOBAL
_RARE: dict[int, Callable[[PickleGuard, int], int]] = {
    0x74: PickleGuard._tuple_to_mark,
    0x65: PickleGuard._items_to_mark,
    0x75: PickleGuard._items_to_mark,
    0x90: PickleGuard._items_to_mark,
    0x64: PickleGuard._container_to_mark,
    0x6C: PickleGuard._container_to_mark,
    0x91: PickleGuard._container_to_mark,
    0x31: PickleGuard._pop_mark,
    0x61: PickleGuard._take_one,
    0x30: PickleGuard._take_one,
    0x73: PickleGuard._take_two,
    0x51: PickleGuard._persistent,
    0x32: PickleGuard._duplicate,
    0x63: PickleGuard._global,
    0x71: PickleGuard._put,
    0x72: PickleGuard._long_put,
    0x58: PickleGuard._skip_4,
    0x42: PickleGuard._skip_4,
    0x54: PickleGuard._skip_4,
    0x8D: PickleGuard._skip_8,
    0x8E: PickleGuard._skip_8,
    0x95: PickleGuard._frame,
    0x80: PickleGuard._protocol,
}

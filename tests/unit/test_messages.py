"""Messages between a rank and its writer survive the wire, and nothing else passes for one."""

from __future__ import annotations

import pytest

from lightning_resilience.checkpoint.messages import (
    Attach,
    Done,
    FileImage,
    Message,
    Remove,
    Save,
    Stop,
    Written,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Attach("/dev/shm/x", 17.5),
    Save(1, "/ckpt/näme", "ab", 30, 0, 2, (FileImage("a", 0, 10), FileImage("b", 4096, 1)), 5.0),
    Remove(2, "/ckpt/old"),
    Stop(),
    Written(1),
    Done(1, "no\nroom", retried=2),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_comes_back_as_one_line(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown message kind 'exec'"):
        decode(b'{"kind": "exec", "code": "1"}')

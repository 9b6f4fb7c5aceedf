"""Values are put back into the objects that held them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_resilience.data.keeping import Copies, is_plain, keep, keep_dict, keep_tensor, keep_uncounted


def test_containers_are_put_back_in_place() -> None:
    value: dict[str, Any] = {"numbers": [1, 2], "seen": {3}, "nested": {"pair": (4, [5])}, "none": None}
    numbers, inner = value["numbers"], value["nested"]["pair"][1]
    put_back = keep_dict(value, Copies())
    numbers.append(9)
    inner.clear()
    value["seen"].add(9)
    value["none"] = 1
    value["new"] = 1
    assert put_back() is value
    assert value == {"numbers": [1, 2], "seen": {3}, "nested": {"pair": (4, [5])}, "none": None}
    assert value["numbers"] is numbers
    assert value["nested"]["pair"][1] is inner


def test_what_is_left_alone_stays() -> None:
    value = {"params": 1, "lr": 0.1}
    put_back = keep_dict(value, Copies(), leave=["params"])
    value.update(params=2, lr=0.2)
    put_back()
    assert value == {"params": 2, "lr": 0.1}


def test_tensors_are_written_back_into_themselves() -> None:
    tensor = torch.ones(2)
    put_back = keep(tensor, Copies())
    tensor.add_(1)
    assert put_back() is tensor
    assert tensor.tolist() == [1.0, 1.0]


def test_a_tensor_that_was_not_written_is_copied_once() -> None:
    copies, tensor = Copies(), torch.ones(2)
    first = copies.of(tensor)[1]
    copies.next_round()
    assert copies.of(tensor)[1] is first
    copies.next_round()
    tensor.add_(1)
    assert copies.of(tensor)[1] is not first
    copies.next_round()
    copies.next_round()
    assert copies.of(tensor)[1] is not first


def test_another_tensor_at_the_same_address_is_not_taken_for_it() -> None:
    copies = Copies()
    copies.of(torch.ones(2))
    assert copies.of(torch.zeros(2))[1].tolist() == [0.0, 0.0]


def test_batch_normalization_writes_without_being_counted() -> None:
    """The reason for `keep_uncounted`: a failure here means that it is not needed any more."""
    layer = nn.BatchNorm1d(2)
    assert layer.running_mean is not None
    counted, uncounted = keep_tensor(layer.running_mean, Copies()), keep_uncounted(layer._buffers)
    before = layer.running_mean.clone()
    layer(torch.randn(4, 2))
    counted()
    assert not torch.equal(layer.running_mean, before)
    uncounted()
    assert torch.equal(layer.running_mean, before)


def test_modules_are_kept_with_their_tensors() -> None:
    layer = nn.Linear(1, 1)
    before = layer.weight.item()
    put_back = keep(layer, Copies())
    with torch.no_grad():
        layer.weight.add_(1)
    put_back()
    assert layer.weight.item() == before


def test_other_objects_are_kept_by_reference() -> None:
    thing = object()
    assert keep(thing, Copies())() is thing
    assert not is_plain([thing])
    assert is_plain({"a": [1, (2.0, "x")], "b": torch.ones(1)})

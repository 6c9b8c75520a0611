"""Checksums of weights, and their comparison with the engine's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.delivery.checksums import (
    CHUNK,
    Checksum,
    Comparison,
    Held,
    HeldComparer,
    add_checksums,
    compare_adapter,
    compute_checksums,
    sum_bits,
)


def test_a_tensor_is_rounded_as_an_engine_does_when_it_copies() -> None:
    weight = torch.tensor([1.0 + 2**-9, 1.0 + 2**-7])  # half a step of bfloat16 to the even 1.0; a whole step
    held = torch.empty(2, dtype=torch.bfloat16).copy_(weight)
    assert sum_bits(weight, torch.bfloat16).tolist() == sum_bits(held).tolist() == [16256 + 16257, 16256**2 + 16257**2]


@given(st.integers(0, 2**31 - 1), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(1, 40))
def test_shards_in_any_order_add_up_and_one_step_of_one_element_shows(seed: int, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(size, 3, generator=generator).to(dtype)
    cut = int(torch.randint(0, size + 1, (), generator=generator))
    shuffled = whole[torch.randperm(size, generator=generator)]
    parts = compute_checksums([("a", shuffled[cut:], None), ("b", shuffled[:cut], None)])
    (expected,) = compute_checksums([("w", whole, None)]).values()
    assert add_checksums(parts.values()) == expected
    whole.view(-1)[0] = torch.nextafter(whole.view(-1)[0], torch.tensor(9.0, dtype=dtype))
    assert compute_checksums([("w", whole, None)])["w"] != expected


def test_long_tensors_are_summed_in_chunks() -> None:
    weight = torch.ones(CHUNK + 3, dtype=torch.bfloat16)
    # (2^22 + 3) 16256^2 fits; 32-bit patterns of the same length wrap round 2^64.
    assert sum_bits(weight).tolist() == [(CHUNK + 3) * 16256, (CHUNK + 3) * 16256**2]
    bits = 0x3F800000
    wide = (CHUNK + 3) * bits**2
    assert sum_bits(weight.float()).tolist() == [(CHUNK + 3) * bits, (wide + 2**63) % 2**64 - 2**63]


# Compared with what the engine holds


OWN = {"q": Checksum(6, 10, 100), "k": Checksum(2, 3, 9), "norm": Checksum(4, 8, 16)}


def held(*sources: str, count: int, total: int, squares: int) -> Held:
    return Held(sources, Checksum(count, total, squares), "bfloat16")


QK, NORM = held("k", "q", count=8, total=13, squares=109), held("norm", count=4, total=8, squares=16)


def test_shards_of_ranks_add_up_and_copies_are_equal_each() -> None:
    shards = [held("k", "q", count=4, total=6, squares=50), held("k", "q", count=4, total=7, squares=59)]
    assert HeldComparer().compare([[shards[0], NORM], [shards[1], NORM]], OWN).different == ()
    stale = held("norm", count=4, total=8, squares=17)
    assert HeldComparer().compare([[shards[0], NORM], [shards[1], stale]], OWN).different == ("norm",)


def test_a_padded_parameter_is_judged_once_it_was_equal() -> None:
    padded = held("norm", count=6, total=8, squares=16)  # two zeros behind
    comparer, moved = HeldComparer(), OWN | {"norm": Checksum(4, 9, 17)}
    assert HeldComparer().compare([[padded]], moved).unknown == ("norm",)
    assert comparer.compare([[padded]], OWN).equal == ("norm",)
    assert comparer.compare([[padded]], moved).different == ("norm",)


def test_what_an_engine_makes_of_weights_is_no_difference_and_has_to_change_with_them() -> None:
    """State-space models hold -exp(A) for a tensor A."""
    comparer, sent = HeldComparer(), {"norm": OWN["norm"]}
    made = held("norm", count=4, total=-5, squares=7)
    assert comparer.compare([[made]], OWN, sent).unknown == ("norm",)
    moved = OWN | {"norm": Checksum(4, 9, 17)}
    assert comparer.compare([[held("norm", count=4, total=-6, squares=8)]], moved).unknown == ("norm",)
    assert comparer.compare([[held("norm", count=4, total=-6, squares=8)]], OWN).different == ("norm",)
    assert HeldComparer().compare([[made]], OWN, {"norm": Checksum(4, 1, 1)}).different == ("norm",)


def test_heads_that_two_ranks_hold_are_unknown() -> None:
    rank = held("k", "q", count=5, total=8, squares=59)  # three of q and both of k
    comparer = HeldComparer()
    assert comparer.compare([[rank], [rank]], OWN).unknown == ("k", "q")
    assert comparer.compare([[rank], [rank]], OWN | {"k": Checksum(2, 4, 16)}).different == ("k", "q")


@pytest.mark.parametrize(
    ("kinds", "fused"), [(("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj")]
)
def test_experts_are_compared_with_the_parameter_that_fuses_them(kinds: tuple[str, ...], fused: str) -> None:
    sources = tuple(f"layers.3.mlp.experts.{number}.{kind}.weight" for number in range(2) for kind in kinds)
    own = {f"layers.3.mlp.experts.{fused}": Checksum(8, 13, 109)}
    assert HeldComparer().compare([[held(*sources, count=8, total=13, squares=109)]], own).equal == tuple(
        sorted(sources)
    )
    assert HeldComparer().compare([[held(*sources, count=8, total=12, squares=109)]], own).different


def test_an_adapter_has_to_be_loaded_and_equal() -> None:
    adapter = {"q.lora_A.weight": Checksum(2, 5, 7)}
    assert compare_adapter(Comparison(), adapter, adapter, loaded=True).equal == ("q.lora_A.weight",)
    assert compare_adapter(Comparison(), adapter, adapter, loaded=False).different == ("q.lora_A.weight",)
    moved = {"q.lora_A.weight": Checksum(2, 5, 8)}
    assert compare_adapter(Comparison(), adapter, moved, loaded=True).different == ("q.lora_A.weight",)

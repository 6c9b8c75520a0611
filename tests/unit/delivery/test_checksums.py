from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.delivery.checksums import CHUNK, Checksum, add_checksums, compute_checksums, sum_bits


def test_hand_worked_sums() -> None:
    # 1.0 and 2.0 in bfloat16 are 0x3F80 = 16256 and 0x4000 = 16384; 16256^2 + 16384^2 = 532 692 992.
    (found,) = compute_checksums([("w", torch.tensor([1.0, 2.0]), torch.bfloat16)]).values()
    assert found == Checksum(2, 32640, 532_692_992)


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

"""Name the socket through which verl sends weights to vLLM without a GPU's UUID.

In 0.7.1 trainer and vLLM's worker each read the UUID of their own GPU and so agree on a name. On the CPU both know the
slot of Ray's resource "GPU" that was given to the worker, and the Ray node that they run on; together these distinguish
replicas and simultaneous runs. 0.8.0 names the socket by replica and rank but still reads the UUID, which vLLM does not
have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..contract import Contract, PatchError
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.workers.rollout.vllm_rollout.utils"


def slot_name(environment: Mapping[str, str]) -> str:
    """Return a name for the slot of Ray's resource "GPU" in a process's environment.

    Raises:
        PatchError: there is no slot or there are several, so vLLM's workers cannot be distinguished.
    """
    slots = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not slots or "," in slots:
        raise PatchError(
            f"patch 'weight_socket': CUDA_VISIBLE_DEVICES={slots!r}, expected one slot of Ray's resource GPU. "
            f"Fix: on the CPU verl before 0.9 needs actor_rollout_ref.rollout.tensor_model_parallel_size=1."
        )
    return f"CPU-{environment.get('RAY_RAYLET_PID', '0')}-{slots}"


def _uuid(original: Callable[..., str], device_id: Any) -> str:
    return slot_name(os.environ)


PATCH = ReleasePatch(
    (
        Wrapping(
            _uuid,
            Contract(
                name="weight_socket",
                target=f"{_MODULE}:get_device_uuid",
                signature="(device_id)",
                distribution="verl",
                releases=specifiers(lambda release: not release.platforms),
            ),
        ),
    ),
    cause=lambda release: not release.platforms,
    after=_MODULE,
)

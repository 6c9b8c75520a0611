"""What the caller's environment and overrides say, and the environment that the children get."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_patches.groups import EXTERNAL_MODULES
from verl_patches.runtime_env import PYTHONPATH, joined

PLATFORMS = ("cpu", "cpu_megatron", "cuda")

COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "0",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_PATCHES = "verl_patches.cpu"
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers no engine for cpu; the one for cuda runs there
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM's sampler would compile two small functions, for 20 s and with a C++ compiler
    "OMP_NUM_THREADS": "1",  # about ten processes share the cores
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

ANY_MODEL_OVERRIDES = (
    # Another tokenizer and chat template take more tokens, another vocabulary more memory, and a model that was
    # trained for months a smaller step.
    "data.max_prompt_length=512",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-6",
)
"""What a model other than the quickstart's own is trained with, before the user's overrides."""


@dataclass(frozen=True)
class Options:
    """One run's options.

    Attributes:
        model: folder of a Hugging Face model to train; None for the quickstart's own.
        platform: one of PLATFORMS, as the group `platform` in configs/.
        time_limit: seconds for the whole run.
        stall_limit: seconds without any output after which the run is ended.
    """

    model: Path | None
    platform: str
    time_limit: float
    stall_limit: float

    @classmethod
    def read(cls, env: Mapping[str, str], overrides: Sequence[str]) -> Options:
        """From MODEL, QUICKSTART_TIME_LIMIT, QUICKSTART_STALL_LIMIT and the override `platform=`.

        Raises:
            ValueError: names the variable, its value and the fix.
        """
        model = Path(env["MODEL"]).expanduser().resolve() if env.get("MODEL") else None
        if model and not (model / "config.json").is_file():
            raise ValueError(f"MODEL={env['MODEL']}: no Hugging Face model lies there, it has no config.json")
        platform = next((o.removeprefix("platform=") for o in reversed(overrides) if o.startswith("platform=")), "cpu")
        if platform not in PLATFORMS:
            raise ValueError(f"platform={platform}: choose one of {', '.join(PLATFORMS)}")
        return cls(
            model=model,
            platform=platform,
            # The quickstart's own model takes 3 to 4 minutes on two cores; nothing is known about another one.
            time_limit=_seconds(env, "QUICKSTART_TIME_LIMIT", 7200.0 if model else 900.0),
            stall_limit=_seconds(env, "QUICKSTART_STALL_LIMIT", 300.0 if model else 180.0),
        )


def child_environment(base: Mapping[str, str], platform: str, root: Path) -> dict[str, str]:
    """The caller's environment with what the children need; what the caller has set stays, lists are joined."""
    added = {**COMMON_ENVIRONMENT, **base, PYTHONPATH: joined(PYTHONPATH, str(root), base.get(PYTHONPATH, ""))}
    if platform.startswith("cpu"):
        # First, because a module of the caller's that imports verl's workers asks for the platform.
        modules = joined(EXTERNAL_MODULES, CPU_PATCHES, base.get(EXTERNAL_MODULES, ""))
        added = {**CPU_ENVIRONMENT, **added, EXTERNAL_MODULES: modules}
    return added


def override(key: str, path: str | Path) -> str:
    """A Hydra override whose value is a path, quoted, since paths may hold spaces, commas or brackets."""
    quoted = str(path).replace("'", "\\'")
    return f"{key}='{quoted}'"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"{name}={text}: give a number of seconds above 0")
    return value

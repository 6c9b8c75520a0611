"""Options of a run, from the caller's environment and overrides, and the trainer settings that result from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_patches import EXTERNAL_MODULES
from verl_patches.releases import attributes_of
from verl_patches.runtime_env import PYTHONPATH, joined

from .free_length import ANCHOR, COEFFICIENTS, MOST_TOKENS
from .own_model import BUCKET, build_bucket_override, find_unusable

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PLATFORMS = ("cpu", "cpu_megatron", "cuda")
MODEL_PATH = "actor_rollout_ref.model.path"
DTYPE = "actor_rollout_ref.rollout.dtype"

COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "0",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_PATCHES = "verl_patches.cpu"
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers no engine for cpu; the one for cuda runs there
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM's sampler would compile two small functions, for 20 s and with a C++ compiler
    "OMP_NUM_THREADS": "1",  # about ten processes share the cores
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

ANY_MODEL_OVERRIDES = (
    # Another tokenizer and chat template need more tokens, another vocabulary needs more memory, and a model that was
    # trained for months needs a smaller learning rate.
    "data.max_prompt_length=512",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-6",
)
"""Settings for a model other than the quickstart's own; they precede the user's overrides."""
SUMS_OVERRIDES = (
    # A chain of three steps needs 27 tokens; the force prompt and the answer follow each prefix.
    "data.max_response_length=40",
    "actor_rollout_ref.rollout.max_model_len=160",
    # On a CPU, vLLM's block is 128 tokens, so no part of these rows would be cached.
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    # Demonstrations contain random errors, so that the likeliest answer is correct from the start.
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    # Only the first training step is recorded; the values of correct and of wrong chain steps are reported for it.
    "offpolicy.record.every=1000000",
)
FREE_LENGTH_OVERRIDES = (
    "reward.custom_reward_function.name=score_last_word",
    f"data.max_response_length={MOST_TOKENS}",
    # The likeliest answer always has the same length.
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)
"""Settings of the task free_length, including those of its length penalty."""
ARITHMETIC_OVERRIDES = (
    "data.train_batch_size=8",
    "data.max_response_length=20",
    # At temperature 1, half of the samples with 4-bit weights are text on another topic.
    "actor_rollout_ref.rollout.temperature=0.7",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.7",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.lr=1e-5",
    "trainer.total_training_steps=12",
)
"""Settings of SmolLM2-135M-Instruct and its task."""
SMOLLM2 = "smollm2"
SMOLLM2_OVERRIDES = (f"{BUCKET}=128",)  # MiB; embeddings of 49152 tokens take 108


@dataclass(frozen=True)
class Task:
    """A task to train on.

    Attributes:
        title: title of the figure.
        data, model: parts of the cache that contain the questions and the quickstart's own model.
        overrides: settings that the task needs; they precede the user's.
    """

    title: str
    data: str
    model: str
    overrides: tuple[str, ...] = ()


WORDS = "reasoning-gym's spell_backward"
TASKS = {
    "spelling": Task(WORDS, "data", "model"),
    "free_length": Task(f"{WORDS}, at free length", "data", "free_length_model", FREE_LENGTH_OVERRIDES),
    "arithmetic": Task("reasoning-gym's chain_sum", "arithmetic", SMOLLM2, ARITHMETIC_OVERRIDES),
    "process_reward": Task("sums modulo 5, with process rewards", "sums", "sums_model", SUMS_OVERRIDES),
}


@dataclass(frozen=True)
class Options:
    """The options of one run.

    Attributes:
        model: folder of the Hugging Face model to train; None for the quickstart's own model.
        platform: one of PLATFORMS.
        task: one of TASKS.
        mixture: whether to train the quickstart's mixture of experts.
        model_overrides: settings that `model` needs; they precede the user's overrides.
    """

    model: Path | None
    platform: str
    task: str = "spelling"
    mixture: bool = False
    model_overrides: tuple[str, ...] = ()

    @classmethod
    def read(cls, env: Mapping[str, str], overrides: Sequence[str]) -> Options:
        """Read MODEL and TASK, and the overrides `platform=`, `model=` and the path of the model under verl's own key.

        Raises:
            ValueError: a value is invalid; the message names the variable, its value and the fix.
        """
        model, key, given = None, "MODEL", env.get("MODEL")
        if (path := find_last(MODEL_PATH, overrides)) is not None:
            key, given = MODEL_PATH, path.strip("'\"")
        small = (key, given) == ("MODEL", SMOLLM2)
        if given and not small:
            model = Path(given).expanduser().resolve()
            has_template = is_set("actor_rollout_ref.model.custom_chat_template", overrides)
            if reason := find_unusable(model, has_template=has_template):
                raise ValueError(f"{key}={given}: {reason}")
        platform = find_last("platform", overrides) or "cpu"
        if platform not in PLATFORMS:
            raise ValueError(f"platform={platform}: choose one of {', '.join(PLATFORMS)}")
        (spelling, *others, by_process) = TASKS
        task = env.get("TASK") or ("arithmetic" if small else spelling)
        if task not in (spelling, *others):
            raise ValueError(f"TASK={task}: choose one of {', '.join((spelling, *others))}")
        if small and task != "arithmetic":
            raise ValueError(f"TASK={task}: MODEL={SMOLLM2} has its own task. Remove TASK or MODEL")
        own = next((section for section in (by_process, "opd") if is_set(section, overrides)), None)
        if task != spelling and own is not None:
            raise ValueError(f"TASK={task}: {own} has its own task. Remove one of the two")
        task = by_process if own == by_process else task
        name = find_last("model", overrides)
        if name not in (None, "moe"):
            raise ValueError(f"model={name}: set model=moe for the mixture of experts, or remove this override")
        if name and (model or small or task != spelling):
            raise ValueError(
                f"model=moe: the mixture of experts has its own task. Remove MODEL, {MODEL_PATH}, TASK and "
                f"process_reward"
            )
        settings: tuple[str, ...] = SMOLLM2_OVERRIDES if task == "arithmetic" else ()
        if model:
            settings = (*ANY_MODEL_OVERRIDES, *build_bucket_override(model, platform, overrides))
        return cls(model, platform, task, mixture=name == "moe", model_overrides=settings)


def build_child_environment(
    base: Mapping[str, str], platform: str, root: Path, *, large: bool = False
) -> dict[str, str]:
    """Build the environment of child processes: the caller's variables are kept, and lists are joined.

    Args:
        large: whether the model is large enough for its matrix products to be shared by all cores.
    """
    added = {**COMMON_ENVIRONMENT, **base, PYTHONPATH: joined(PYTHONPATH, str(root), base.get(PYTHONPATH, ""))}
    if platform.startswith("cpu"):
        # This comes first, because a module of the caller that imports verl's workers reads the platform.
        modules = joined(EXTERNAL_MODULES, CPU_PATCHES, base.get(EXTERNAL_MODULES, ""))
        # By default, the allocator has one arena per thread; freed memory in these arenas would add up over the
        # processes.
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "MALLOC_ARENA_MAX": "2"} if large else {}
        added = {**CPU_ENVIRONMENT, **threads, **added, EXTERNAL_MODULES: modules}
    return added


def build_release_overrides(platform: str, release: str, overrides: Sequence[str] = ()) -> list[str]:
    """Build the overrides for this release of verl: the option of the group `platform`, and the release's own keys.

    Args:
        overrides: the user's overrides, which come after these.
    """
    of = attributes_of(release)
    chosen = [f"platform={'cpu_before_0_9' if platform == 'cpu' and not of.platforms else platform}"]
    if of.v1_modes and (mode := find_trainer_mode(overrides)) != "sync":
        if is_set("offpolicy.staleness.eta", overrides):
            # Keys that eta replaces and that an option of the group `mode` may have set.
            replaced = f"trainer.v1.{mode}.num_warmup_batches", "trainer.v1.sampler.max_off_policy_threshold"
            chosen += [f"{key}=null" for key in replaced]
    elif of.v1_modes:
        sampler, path = "trainer.v1.sampler.custom_sampler", Path(__file__).with_name("sampler.py").resolve()
        chosen += [quote(f"{sampler}.path", path), f"{sampler}.name=QuickReplayBuffer"]
    return chosen


def find_trainer_mode(overrides: Sequence[str]) -> str:
    """Find verl's `trainer.v1.trainer_mode`, set by overrides or an option of the group `mode`; the default is sync."""
    mode = find_last("trainer.v1.trainer_mode", overrides)
    file = CONFIGS / "mode" / f"{find_last('mode', overrides)}.yaml"
    if mode is None and file.is_file():  # a missing option is rejected by Hydra
        mode = yaml.safe_load(file.read_text())["trainer"]["v1"]["trainer_mode"]
    return mode or "sync"


def find_last(key: str, overrides: Sequence[str]) -> str | None:
    """Find the value to which the last override of a key sets it; None if there is no override."""
    given = [override.lstrip("+").partition("=") for override in overrides]
    return next((value for name, _, value in reversed(given) if name == key), None)


def is_set(key: str, overrides: Sequence[str]) -> bool:
    """Return True if an override sets a key, or a section of it, to a value that is not null."""
    return find_last(key, overrides) not in (None, "null")


def needs_teacher(overrides: Sequence[str]) -> bool:
    """Return True if on-policy distillation is on but no teacher is named."""
    return is_set("opd", overrides) and find_last("opd.teacher.url", overrides) is None


def build_task_overrides(options: Options, overrides: Sequence[str]) -> list[str]:
    """Build the overrides that the task, the model and the user's overrides require."""
    found = [*TASKS[options.task].overrides]
    if options.task == "free_length":
        found += build_length_overrides(overrides)
    if find_last("actor_rollout_ref.actor.fsdp_config.router_replay.mode", overrides) == "R3":
        found.append("actor_rollout_ref.rollout.enable_rollout_routing_replay=true")
    if options.model or options.task == "arithmetic":
        # The evidence for both settings is in docs/evidence/real_model.md. The default band of gsm, which is part of
        # the quickstart's own choice, drops most of a pretrained model's short answers. bfloat16 rounds away most of
        # each update of such a model; on a GPU, a float32 engine may be too large or too slow.
        if find_last("correction", overrides) is None:
            found.append("correction=tis_token")
        if options.platform != "cuda" and find_last(DTYPE, overrides) is None:
            found.append(f"{DTYPE}=float32")
    if is_set("opd", overrides):
        # The task gives partial credit, and a reward of 1 for a correct word.
        found.append("opd.eligible.passed_above=0.99")
    return found


def build_length_overrides(overrides: Sequence[str]) -> list[str]:
    """Build the overrides of a length penalty: lengths are measured, unless the user's overrides say otherwise."""
    kind = find_last("length_penalty", overrides)
    found = ["length_penalty=none"] if kind is None else []
    if kind in COEFFICIENTS:
        found.append(f"length_penalty.coefficient={COEFFICIENTS[kind]:g}")
    if kind == "anchor":
        found += [f"length_penalty.anchor.{name}={value}" for name, value in ANCHOR.items()]
    return found


def quote(key: str, path: str | Path) -> str:
    """Build a Hydra override that sets a path, which is quoted, because it may contain spaces, commas or brackets."""
    quoted = str(path).replace("'", "\\'")
    return f"{key}='{quoted}'"

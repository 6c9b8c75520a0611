"""Entry point: verl's PPO training with an off-policy correction.

    python -m recipe.offpolicy.main_offpolicy 'correction=[tis_token,gsm]' data.train_files=...

takes every override that ``verl.trainer.main_ppo`` takes. ``--check`` runs all start-up checks and exits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from verl_patches.contract import PatchError
from verl_patches.runtime_env import forward

from .checks import CheckError, advice, run_checks, shadows_of, verl_correction_changes
from .composition import AUTO, EMPTY, check_stack, chosen_options, option_values, own_keys_for_us, recomposed
from .correction import CorrectionSpec, SpecError
from .live_path import live_path
from .recording.settings import resolve_dir
from .run_setup import read_setup, refuse_setup
from .selector import check_requirements, lines, select
from .shadow import check_beside, parse_shadows

CONFIG_DIR = str(Path(__file__).resolve().parent / "config")
_CHECK_FLAG = "--check"


def prepare(config: DictConfig) -> CorrectionSpec:
    """Choose for ``correction=auto``, validate, and turn verl's idle correction off: in place."""
    options = chosen_options()
    check_stack(options)
    if options == [AUTO]:
        options = _choose(config)
    else:
        refuse_setup(config)
    _resolve_shadows(config)
    spec = run_checks(config)
    resolve_dir(config)
    check_beside(spec, shadows_of(config))
    if spec.is_none and not EMPTY.issuperset(options):
        raise SpecError(
            f"correction=[{','.join(options)}]: nothing is left of it to correct with. Set correction=none."
        )
    if not spec.is_none and not verl_correction_changes(config):
        # At its defaults verl's helper corrects nothing but runs every step over the padded batch.
        with open_dict(config):
            config.algorithm.rollout_correction = None
    return spec


def _resolve_shadows(config: DictConfig) -> None:
    """Names of options in ``offpolicy.shadow`` replaced by what they mean, which only Hydra's application knows."""
    names = OmegaConf.select(config, "offpolicy.shadow", default=[])
    if not isinstance(names, str | ListConfig | list):
        raise SpecError(f"offpolicy.shadow={names}: expected names of corrections. Set offpolicy.shadow=[gsm], or [].")
    shadows, notes = parse_shadows(
        [names] if isinstance(names, str) else list(names),
        option_values,
        OmegaConf.select(config, "offpolicy.shadow_delta", default=0.1),
    )
    if not shadows:
        return
    with open_dict(config):
        config.offpolicy.shadow = {name: shadow.to_mapping() for name, shadow in shadows.items()}
    for note in notes:
        print(f"offpolicy: {note}", flush=True)


def _choose(config: DictConfig) -> list[str]:
    """The options for the run's set-up, put into ``config.correction``; prints what and why."""
    selection = select(read_setup(config))
    check_stack(selection.options)
    with open_dict(config):
        config.correction = recomposed(selection.options)
    for line in lines(selection):
        print(f"offpolicy: {line}", flush=True)
    check_requirements(config, selection.requires)
    return list(selection.options)


def train(config: DictConfig) -> None:
    """Run verl's training with our task runner."""
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    if live_path(config).trainer == "v1":
        from .task_runner_v1 import RemoteTaskRunner
    else:
        from .task_runner_v0 import RemoteTaskRunner

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=RemoteTaskRunner)


def main() -> None:
    arguments = sys.argv[1:]
    only_check = _CHECK_FLAG in arguments
    sys.argv[1:] = [argument for argument in arguments if argument != _CHECK_FLAG]

    @hydra.main(config_path=CONFIG_DIR, config_name="offpolicy_trainer", version_base=None)
    def run(config: DictConfig) -> None:
        try:
            spec = prepare(config)
            forward(config, groups=["legacy"] if live_path(config).worker == "legacy" else [])
        except (SpecError, CheckError, PatchError) as error:
            sys.exit(f"offpolicy: stopped before anything was started.\n{error}")
        print(f"offpolicy: {live_path(config)}", flush=True)
        print(f"offpolicy: all checks passed; {spec.to_mapping()}, fingerprint {spec.fingerprint()}", flush=True)
        for line in advice(config, spec):
            print(f"offpolicy: {line}", flush=True)
        if not only_check:
            train(config)

    try:
        sys.argv[1:] = own_keys_for_us(sys.argv[1:])
    except SpecError as error:
        sys.exit(f"offpolicy: stopped before anything was started.\n{error}")
    run()


if __name__ == "__main__":
    main()

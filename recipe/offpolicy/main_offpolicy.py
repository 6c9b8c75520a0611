"""Entry point: verl's PPO training with an off-policy correction.

    python -m recipe.offpolicy.main_offpolicy 'correction=[tis_token,gsm]' data.train_files=...

takes every override that ``verl.trainer.main_ppo`` takes. ``--check`` runs all start-up checks and exits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, open_dict

from .checks import CheckError, advice, run_checks, verl_correction_changes
from .composition import check_stack, chosen_options, own_keys_for_us
from .correction import CorrectionSpec, SpecError

CONFIG_DIR = str(Path(__file__).resolve().parent / "config")
_CHECK_FLAG = "--check"


def prepare(config: DictConfig) -> CorrectionSpec:
    """Validate the composed configuration and turn verl's idle correction off, in place."""
    options = chosen_options()
    check_stack(options)
    spec = run_checks(config)
    if spec.is_none and options != ["none"]:
        raise SpecError(
            f"correction=[{','.join(options)}]: nothing is left of it to correct with. Set correction=none."
        )
    if not spec.is_none and not verl_correction_changes(config):
        # At its defaults verl's helper corrects nothing but runs every step over the padded batch.
        with open_dict(config):
            config.algorithm.rollout_correction = None
    return spec


def train(config: DictConfig) -> None:
    """Run verl's training with our task runner."""
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from .task_runner import RemoteOffPolicyTaskRunner

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=RemoteOffPolicyTaskRunner)


def main() -> None:
    arguments = sys.argv[1:]
    only_check = _CHECK_FLAG in arguments
    sys.argv[1:] = [argument for argument in arguments if argument != _CHECK_FLAG]

    @hydra.main(config_path=CONFIG_DIR, config_name="offpolicy_trainer", version_base=None)
    def run(config: DictConfig) -> None:
        try:
            spec = prepare(config)
        except (SpecError, CheckError) as error:
            sys.exit(f"offpolicy: stopped before anything was started.\n{error}")
        print(f"offpolicy: all checks passed; {spec.to_mapping()}, fingerprint {spec.fingerprint()}", flush=True)
        for line in advice(spec):
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

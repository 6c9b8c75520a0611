"""verl's PPO training with an off-policy correction.

  python -m recipe.offpolicy.main_offpolicy [--check] 'correction=[tis_token,gsm]' data.train_files=... ...

correction=NAME   one option, or several: 'correction=[tis_token,gsm]'; none trains with verl's own loss.
                  docs/corrections.md lists them
KEY=VALUE         any override that verl.trainer.main_ppo accepts
--check           run all start-up checks and exit with 0 if they pass, or with 1 if they would stop the launch
--cfg job         show the whole configuration and exit; --hydra-help lists Hydra's other flags

  python -m recipe.offpolicy.doctor KEY=VALUE ...     which corrections would be live, with fixes
"""

from __future__ import annotations

import sys

from .process_start import CHECK_FLAG, answer_help, end_start, hasten_check, hasten_start

if __name__ == "__main__":  # before imports that take seconds
    answer_help(__doc__)
    if CHECK_FLAG in sys.argv[1:]:
        hasten_check()
    else:
        hasten_start()

from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_patches.contract import PatchError
from verl_patches.trainer_seams import find_task_runner

from .correction import SpecError
from .correction.problem import CheckError
from .doctor.launch import compose, parse_flags, prepare_arguments
from .doctor.program import Launch, LaunchError
from .fault_tolerance.redaction import redact_streams
from .launch_callback import check, say
from .preflight.python_source import OURS

CONFIG_DIR = str(Path(__file__).resolve().parent / "config")


def train(config: DictConfig) -> None:
    """Run verl's training; its processes import our hooks."""
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    end_start()
    run_ppo(config, task_runner_class=find_task_runner(config))


def main() -> None:
    redact_streams()
    arguments = sys.argv[1:]
    given = [argument for argument in arguments if argument != CHECK_FLAG]
    checked: list[DictConfig] = []
    passed: list[str] = []

    @hydra.main(config_path=CONFIG_DIR, config_name="offpolicy_trainer", version_base=None)
    def run(config: DictConfig) -> None:
        for line in passed:  # a caller that waits for these lines may then read Hydra's folder
            say(line)
        train(checked[0])

    try:
        shows = parse_flags(given).shows and given == arguments
        checked.append(compose(Launch(OURS, tuple(given))))
        if not shows:
            passed += check(checked[0])
        sys.argv[1:] = prepare_arguments(given)
    except (LaunchError, SpecError, CheckError, PatchError, OmegaConfBaseException) as error:
        sys.exit(f"offpolicy: stopped before anything was started.\n{error}")
    if given == arguments:
        GlobalHydra.instance().clear()  # Hydra still has the checked configuration
        run()
    else:
        for line in passed:
            say(line)


if __name__ == "__main__":
    main()

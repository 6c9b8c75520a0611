"""Translate a correction from another framework's configuration, and into ours, verl's, SkyRL's or TRL's.

    python -m recipe.offpolicy.translate --from areal config.yaml --to hydra
    python -m recipe.offpolicy.translate --from prime_rl trainer.toml --to verl

--from areal, miles, nemo_rl, open_instruct, openrlhf, prime_rl, roll, skyrl, slime, trl, verl; the file is the whole
configuration, or the section that holds the correction, in YAML or TOML. --to hydra prints overrides of a launch, the
others the section of that framework in YAML. What cannot be said there is an error that names it.

Exit status: 0, or 2 where a file or an argument is invalid, or something cannot be said.
"""

from ..usage import answer_help

if __name__ == "__main__":
    answer_help(__doc__)

    import sys

    from ..command_line import run
    from .translate_command import main

    sys.exit(run("translate", main))

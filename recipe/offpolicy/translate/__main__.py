"""Translate a correction from another framework's configuration into this package's, verl's, SkyRL's or TRL's.

    python -m recipe.offpolicy.translate --from areal config.yaml --to hydra
    python -m recipe.offpolicy.translate --from prime_rl trainer.toml --to verl

--from takes one of these frameworks; the supported keys are those of the given releases:

    areal 1.0.0 to 1.0.4             prime_rl 0.6.0 to 0.8.0
    miles 0.0.2 to 0.1.0             roll 0.2.0 to 0.3.0
    ms_swift 4.6.0                   skyrl 0.1.0 to 0.4.0
    nemo_rl 0.5.0 to 0.7.0           slime 0.2.4 to 0.3.1
    open_instruct 0.2.0 to 0.3.0     trl 0.28.0 to 1.16.0
    openrlhf 0.9.1 to 0.11.2         verl 0.7.0 to 0.9.1

The file contains the whole configuration, a section, or flat options, in YAML or TOML; a missing key has the default of
the newest of these releases. --to hydra prints overrides for verl's own programs; with --from verl, they also switch
verl's own correction off. In a fork, write correction= instead of +correction@correction=. The other targets are skyrl,
trl (from 1.6.0 on) and verl; they print that framework's section in YAML.

A correction that the target cannot express, or an unknown key that may belong to one, leads to an error that names the
key. Keys that belong to the loss or have similar names, but correct nothing, are listed on standard error. --ignore
KEY, which may be repeated, declares that an unknown key corrects nothing.

Exit status: 0, or 2 if a file or an argument is invalid, or something cannot be expressed.
"""

from ..process_start import answer_help

if __name__ == "__main__":
    answer_help(__doc__)

    import sys

    from ..command_line import run
    from .translate_command import main

    sys.exit(run("translate", main))

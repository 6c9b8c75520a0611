"""A recipe's own main program, as verl's recipes have. The doctor reads this file and does not run it."""

import hydra


@hydra.main(config_path="config", config_name="own_trainer", version_base=None)
def main(config): ...


if __name__ == "__main__":
    main()

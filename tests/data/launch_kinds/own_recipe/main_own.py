"""A recipe's own program, as recipes of verl have one. The doctor reads it and does not run it."""

import hydra


@hydra.main(config_path="config", config_name="own_trainer", version_base=None)
def main(config): ...


if __name__ == "__main__":
    main()

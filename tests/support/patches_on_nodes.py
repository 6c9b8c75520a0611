"""A small driver that asks a worker on each node of a Ray cluster for its patches, and prints the answers as JSON.

It connects as verl does, with the runtime environment of the configuration that `verl_patches.runtime_env` completed.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_patches.runtime_env import forward


@ray.remote(num_cpus=0)
def patches() -> dict[str, object]:
    import verl  # noqa: F401 - loads what the environment asks for
    import verl_patches

    return {
        "node": ray.get_runtime_context().get_node_id(),
        "modules": os.environ.get("VERL_USE_EXTERNAL_MODULES"),
        "token": os.environ.get("OFFPOLICY_TOKEN"),
        "from": verl_patches.__file__,
        "status": verl_patches.status(),
    }


def main() -> None:
    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": None}}})
    forward(config)
    OmegaConf.set_struct(config, True)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))  # type: ignore[arg-type]
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    answers = ray.get(
        [
            patches.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in nodes
        ],
        timeout=300,
    )
    print("PATCHES " + json.dumps({"nodes": nodes, "answers": answers, "arguments": sys.argv[1:]}))


if __name__ == "__main__":
    main()

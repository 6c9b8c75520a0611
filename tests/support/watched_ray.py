"""A Ray actor that waits for others as verl's task runner does, watched over; one of the others dies or hangs.

python watched_ray.py dies|hangs
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import ray


@ray.remote(num_cpus=0)
class Worker:
    def pid(self) -> int:
        return os.getpid()

    def serve(self) -> None:
        time.sleep(3600.0)


@ray.remote(num_cpus=0)
class TaskRunner:
    def run(self, fault: str) -> None:
        # Ray ships this class by value, without what its module imports for nested classes.
        from types import SimpleNamespace

        from omegaconf import OmegaConf

        from recipe.offpolicy.fault_tolerance.watchdog import watch

        worker: Any = Worker
        server, actor = worker.remote(), worker.remote()
        pid = ray.get(server.pid.remote())

        class Trainer:
            global_steps = 5
            actor_rollout_wg = SimpleNamespace(workers=[actor])
            llm_server_manager = SimpleNamespace(server_handles=[server])

            def _update_actor(self) -> None:
                # Not the one that dies: its own death would be noticed by whoever waits for it.
                call = actor.serve.remote()
                if fault == "dies":
                    os.kill(pid, signal.SIGKILL)
                ray.get(call)

            def fit(self) -> None:
                self._update_actor()

        limit = 8.0 if fault == "hangs" else None
        settings: dict[str, Any] = {"step_timeout": limit, "phase_timeouts": {}, "poll": 1}
        trainer = Trainer()
        watch(trainer, OmegaConf.create({"offpolicy": {"watchdog": settings}}))
        trainer.fit()


def main(fault: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    runner: Any = TaskRunner
    ray.get(runner.remote().run.remote(fault))


if __name__ == "__main__":
    main(sys.argv[1])

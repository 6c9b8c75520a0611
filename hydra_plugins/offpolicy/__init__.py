"""Hydra plugin: makes this package's configuration groups available to every Hydra program in the environment.

Hydra imports this plugin only in processes that launch a program.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_patches.hydra_sections import PROVIDER, bring_sections, find_folder


class OffPolicySearchPath(SearchPathPlugin):
    """Appends ``configs/`` to the search path, after the program's own folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider=PROVIDER, path=f"file://{find_folder()}")
        bring_sections()

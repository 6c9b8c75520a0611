"""Version of this project, for packages, copies in forks, ``offpolicy --version`` and CITATION.cff."""

from typing import Final

VERSION: Final = "0.1.0"

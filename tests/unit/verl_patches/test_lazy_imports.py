"""Lazy imports of a package: when each import happens, and that the package's code sees what it would see
without them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh_python import ok

WRITTEN = {
    "heavy": "import sys\nsys.modules['log'].append('heavy')\nclass Thing: ...\nvalue = 3\n",
    "heavy_part": "import sys\nsys.modules['log'].append('heavy_part')\n",
    "broken": "raise RuntimeError\n",
    "lazy/__init__": "from .part import value\nfrom .other import later\n",
    "lazy/other": "import sys\nsys.modules['log'].append('lazy.other')\nlater = 5\n",
}
START = """
import sys
log = []
sys.modules["log"] = log
from verl_patches import lazy_imports
lazy_imports.install("lazy")
lazy_imports.install("lazy")
"""


def run(folder: Path, part: str, code: str, **written: str) -> list[str]:
    """Return what the code prints, line by line, next to a package ``lazy`` whose module ``part`` is given."""
    for name, text in {**WRITTEN, **written, "lazy/part": part}.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return ok(f"{START}\n{code}", path=str(folder), bare=True).split("\n")[:-1]


def test_an_import_is_made_when_its_name_is_looked_up(tmp_path: Path) -> None:
    part = "from heavy import Thing, value\ndef use(): return value\n"
    printed = run(tmp_path, part, "import lazy.part as p; print(log); print(p.use(), log); print(p.Thing.__name__)")
    assert printed == ["[]", "3 ['heavy']", "Thing"]


@pytest.mark.parametrize(
    "part",
    [
        "import heavy\nbase = heavy.Thing\n",
        "from heavy import *\n",
        "try:\n    import heavy\n    found = True\nexcept ImportError:\n    found = False\n",
        "def __getattr__(name): raise AttributeError(name)\nimport heavy\n",
    ],
)
def test_what_the_module_itself_needs_is_imported_at_once(part: str, tmp_path: Path) -> None:
    assert run(tmp_path, part, "import lazy.part; print(log)") == ["['heavy']"]


def test_annotations_of_functions_import_nothing(tmp_path: Path) -> None:
    part = "import heavy\ndef f(a: heavy.Thing, *b: heavy.Thing) -> heavy.Thing: return a\n"
    part += "class C:\n    def m(self, a: heavy.Thing) -> heavy.Thing: return a\n"
    assert run(tmp_path, part, "import lazy.part as p; print(p.f(1), p.C().m(2), log)") == ["1 2 []"]


def test_a_fallback_is_taken_when_the_name_is_looked_up(tmp_path: Path) -> None:
    part = (
        "try:\n    from not_there import thing\n    import heavy\nexcept ImportError:\n    class thing: name = 'own'\n"
    )
    assert run(tmp_path, part, "import lazy.part as p; print(log, p.thing.name)") == ["[] own"]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        ("RuntimeError('half installed')", "RuntimeError half installed"),
        ("KeyError('HOME')", "LookupError broken cannot be imported: KeyError('HOME')"),
    ],
)
def test_an_import_that_fails_raises_where_its_name_is_looked_up(raised: str, seen: str, tmp_path: Path) -> None:
    part = "import broken\ndef use(): return broken\n"
    code = (
        "import lazy.part as p\ntry:\n    p.use()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert run(tmp_path, part, code, broken=f"raise {raised}\n") == [seen]


def test_a_name_that_its_statement_does_not_bind_is_not_defined(tmp_path: Path) -> None:
    part = "try:\n    from not_there import thing\nexcept ImportError: pass\ndef use(): return thing\n"
    code = "import lazy.part as p\nprint(hasattr(p, 'thing'))\n"
    code += "try:\n    p.use()\nexcept NameError as error:\n    print(error)"
    assert run(tmp_path, part, code) == ["False", "name 'thing' is not defined"]

"""Child processes import the modules of their parent in any working folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shared import children
from shared.options import flags_doc


def test_child_process_in_foreign_folder_imports_own_modules(tmp_path: Path) -> None:
    for name in ("shared", "argparse"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('a foreign {name}')\n")
    command, environment = children.command("shared.options.flags_doc"), children.environment()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip() == flags_doc.to_markdown().rstrip()

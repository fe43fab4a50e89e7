"""Grammar of a patch format, as agents send it with a custom tool, and texts in it."""

from __future__ import annotations

PATCH_GRAMMAR = r"""
start: first_line section+ last_line
first_line: "*** Begin Patch" LF
last_line: "*** End Patch" LF?

section: added | deleted | updated
added: "*** Add File: " path LF new_line+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? lines?

path: /(.+)/
new_line: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
lines: (place | line)+ at_end?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
at_end: "*** End of File" LF

%import common.LF
"""
_UPDATE = '*** Begin Patch\n*** Update File: a "b".py\n@@ def f\n-x\\n\n+ü\t<|x|>/~\n'
PATCHES = [
    "*** Begin Patch\n*** Add File: notes.txt\n+one\n+\n*** End Patch",
    f"{_UPDATE}*** End Patch\n",
    f"{_UPDATE}*** End of File\n*** Delete File: c\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: a\n*** Move to: b\n*** End Patch\n",
]
OTHER_TEXTS = ["", "patch", _UPDATE, f"{_UPDATE}x\n*** End Patch\n", f"{PATCHES[0]}\n\n"]

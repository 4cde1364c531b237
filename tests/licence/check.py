#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every source file names its licence within its first five lines.

    check.py [--fix]

--fix writes the line where it lacks: first in the file, behind a line that tells the system what
runs the file.
"""

import os
import subprocess
import sys

LINE = "SPDX-License-Identifier: Apache-2.0"
WITHIN = 5
# Comments by the end of a file's name: what goes before the line, and after it.
COMMENTS = {
    (".c", ".h", ".cu", ".cuh", ".S", ".map"): ("/* ", " */"),
    (".proto",): ("// ", ""),
    (".py", ".py.in", ".sh", ".cmake", "CMakeLists.txt", ".ci/run"): ("# ", ""),
    (".c.in", ".h.in"): ("/* ", " */"),
}

root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def comment_of(path):
    """The comment's two halves, or None where a file of this kind needs no line."""
    return next((halves for ends, halves in COMMENTS.items() if path.endswith(ends)), None)


def files():
    """What git tracks; where there is no git, as in an unpacked release, everything but builds."""
    try:
        out = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        return [path for path in out.decode().split("\0") if path]
    except (OSError, subprocess.CalledProcessError):
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in (".git", "build")]
            found += [os.path.relpath(os.path.join(folder, name), root) for name in names]
        return found


def fix(path, before, after):
    with open(os.path.join(root, path), "r+") as file:
        lines = file.readlines()
        behind = 1 if lines and lines[0].startswith("#!") else 0
        lines.insert(behind, before + LINE + after + "\n")
        file.seek(0)
        file.writelines(lines)


def main():
    checked, missing = 0, []
    for path in files():
        halves = comment_of(path)
        if halves is None or not os.path.exists(os.path.join(root, path)):
            continue
        checked += 1
        with open(os.path.join(root, path)) as file:
            if not any(LINE in file.readline() for _ in range(WITHIN)):
                missing.append(path)
                if "--fix" in sys.argv[1:]:
                    fix(path, *halves)
    for path in missing:
        print("%s: no line %r" % (path, LINE))
    print("%d files, %d without the line" % (checked, len(missing)))
    return 1 if missing and "--fix" not in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())

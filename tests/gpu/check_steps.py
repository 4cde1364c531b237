#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every step of run.sh names things that exist: programs, tests in Python, scenarios.

    check_steps.py BUILD_DIRECTORY

A machine without a GPU cannot run the steps, so a renamed test would go unnoticed here.
"""

import glob
import os
import re
import shlex
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FOLDERS = ("tests/integration", "tests/chaos")  # with test programs
LOAD = """
import os, sys, unittest
script, names = sys.argv[1], sys.argv[4:]
sys.argv[1:] = sys.argv[2:4]
sys.path.insert(0, os.path.dirname(script))
module = __import__(os.path.basename(script)[:-3])
loader = unittest.TestLoader()
for name in names:
    if loader.loadTestsFromName(name, module).countTestCases() == 0 or loader.errors:
        sys.exit("there is no test " + name)
"""


def text_of(pattern):
    return "".join(open(path, encoding="utf-8").read()
                   for path in sorted(glob.glob(os.path.join(ROOT, pattern), recursive=True)))


def steps(build):
    out = subprocess.run(["sh", os.path.join(HERE, "run.sh"), build, "--list", "4", "--sanitizer"],
                         check=True, stdout=subprocess.PIPE, text=True).stdout
    for line in out.splitlines():
        name, _, command = line.split(" ", 2)
        yield name, shlex.split(command)


def main(build):
    cmake = text_of("tests/**/*.cmake") + text_of("tests/**/CMakeLists.txt")
    scenarios = text_of("tests/conformance/*.c")
    wrong, names, tests = [], [], {}
    for name, words in steps(build):
        names.append(name)
        for at, word in enumerate(words):
            script = os.path.abspath(word)
            if word.endswith(".py") and os.path.dirname(script).endswith(FOLDERS):
                tests.setdefault((script, *words[at + 1:at + 3]), set()).update(words[at + 3:])
                break
            if word.endswith(".py") and not os.path.exists(script):
                wrong.append("%s: there is no %s" % (name, word))
            if word.startswith(build + "/"):
                if not re.search(r"\b%s\b" % re.escape(os.path.basename(word)), cmake):
                    wrong.append("%s: nothing builds %s" % (name, word))
            if word == "--only" and not re.search(r"\b%s" % re.escape(words[at + 1]), scenarios):
                wrong.append("%s: no scenario is called %s" % (name, words[at + 1]))
    for (script, *arguments), wanted in tests.items():
        load = [sys.executable, "-B", "-c", LOAD, script, *arguments, *sorted(wanted)]
        run = subprocess.run(load, stderr=subprocess.PIPE, text=True)
        if run.returncode != 0:
            wrong.append("%s: %s" % (os.path.basename(script), run.stderr.strip().splitlines()[-1]))
    wrong += ["two steps are called " + name for name in sorted(set(names))
              if names.count(name) > 1]
    print("\n".join(wrong) or "%d steps, %d test programs: all exist" % (len(names), len(tests)))
    return 1 if wrong or not names or not tests else 0


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))

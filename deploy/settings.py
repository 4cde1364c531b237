#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the reference of a daemon's settings from what it prints for --help.

    settings.py PROGRAM FILE

The reference is a file for --config in which each setting is a comment with its default.
"""

import re
import sys
import textwrap

import program_help

# Options of the command line that are no settings.
ACTIONS = {"config", "check-config", "version", "help"}
DEFAULT = re.compile(r"^(.*) \[([^][]*)\]$")

HEAD = """\
# All settings of {name}, each with its default. A setting counts once its line has no '#'.
# A word in capitals stands where a setting has no default. To check a file:
#   {name} --config FILE --check-config
"""


def setting(option):
    """The paragraph of an option."""
    found = DEFAULT.match(option.text)
    text, value = found.groups() if found else (option.text, option.value or "false")
    if "|" in option.value and found:
        text += " (%s)" % option.value
    lines = textwrap.wrap(text + ".", 96, break_on_hyphens=False, break_long_words=False)
    return "".join("# %s\n" % line for line in lines) + ("#%s = %s" % (option.name, value)).rstrip()


def main(program, path):
    found = program_help.read(program)
    paragraphs = [HEAD.format(name=found.name).rstrip()]
    paragraphs += [setting(o) for o in found.page.options if o.name not in ACTIONS]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n\n".join(paragraphs) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])

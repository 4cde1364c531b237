# SPDX-License-Identifier: Apache-2.0
"""Reads what programs print for --help, so that the tables in the programs are the only lists of
options. manual.py, completions.py and settings.py make their files from it."""

import collections
import os
import re
import subprocess

Option = collections.namedtuple("Option", "letter name value text")
# One text of --help: what is before its options, the options, what is after them.
Page = collections.namedtuple("Page", "usage summary actions options examples")
# A program with options has a page. One with commands has their pages and summaries by name
# instead, and the lines of the text that lists them.
Program = collections.namedtuple("Program", "name page commands summaries lines")
OPTION = re.compile(r"^  (?:-(\w),|   ) --([\w-]+) (\S*)\s+(.*)$")
COMMAND = re.compile(r"^  ([\w-]+) +(.*)$")


def ask(program, *arguments):
    return subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE,
                          text=True).stdout


def parse(text):
    """A text of moe_options_print with its head, and with the examples of moectl."""
    lines = text.splitlines()
    usage = lines[0].split(": ", 1)[1]
    options = [Option(*found.groups()) for found in map(OPTION.match, lines) if found]
    first = next(i for i, line in enumerate(lines) if OPTION.match(line))
    head = [line for line in lines[1:first] if line != "options:"]
    actions = []
    if "actions:" in head:
        at = head.index("actions:")
        end = next(i for i in range(at, len(head)) if not head[i])
        actions, head = head[at + 1:end], head[:at] + head[end:]
    examples = lines[lines.index("examples:") + 1:] if "examples:" in lines else []
    return Page(usage, [line for line in head if line], actions, options, examples)


def read(program):
    name, text = os.path.basename(program), ask(program, "--help")
    lines = text.splitlines()
    if any(map(OPTION.match, lines)):
        return Program(name, parse(text), {}, {}, lines)
    summaries = {found.group(1): found.group(2) for found in map(COMMAND.match, lines) if found}
    commands = {c: parse(ask(program, c, "--help")) for c in summaries if c != "help"}
    return Program(name, None, commands, summaries, lines)


def choices(option):
    """The words that an option takes; none if they cannot be known."""
    return option.value.split("|") if "|" in option.value and option.value.islower() else []


def actions(page):
    """(word, text) of each action of a command."""
    lines = [line.strip() for line in page.actions if not line.startswith("   ")]
    return [(line.split()[0], line.split("  ")[-1].strip()) for line in lines]

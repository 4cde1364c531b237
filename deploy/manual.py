#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes man pages and bash completions from what programs print for --help.

    manual.py PROGRAM VERSION MAN_PAGE COMPLETION

So the tables of options in the programs are the only lists of options.
"""

import collections
import os
import re
import subprocess
import sys

Option = collections.namedtuple("Option", "letter name value text")
# One text of --help: what is before its options, the options, what is after them.
Help = collections.namedtuple("Help", "usage summary actions options examples")
OPTION = re.compile(r"^  (?:-(\w),|   ) --([\w-]+) (\S*)\s+(.*)$")
ACTION = re.compile(r"^  (\S+)")
COMMAND = re.compile(r"^  (\w+) +(.*)$")


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
    return Help(usage, [line for line in head if line], actions, options, examples)


# ---------------------------------------------------------------------------- man


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\\&" + text if text.startswith(".") else text


def man_options(options):
    for o in options:
        letter = "\\fB\\-%s\\fR, " % o.letter if o.letter else ""
        value = " \\fI%s\\fR" % escape(o.value) if o.value else ""
        yield ".TP\n%s\\fB\\-\\-%s\\fR%s\n%s" % (letter, escape(o.name), value, escape(o.text))


def man_example(lines):
    if lines:
        yield ".PP\n.nf\n%s\n.fi" % "\n".join(escape(line) for line in lines)


def man_head(name, version, purpose, usage):
    yield '.TH %s 1 "" "moed %s" "moed"' % (escape(name), version)
    purpose = purpose[0].lower() + purpose[1:].rstrip(".")
    yield ".SH NAME\n%s \\- %s" % (escape(name), escape(purpose))
    yield ".SH SYNOPSIS\n.B %s" % escape(usage)


def man_daemon(name, version, page):
    yield from man_head(name, version, page.summary[0], page.usage)
    yield ".SH DESCRIPTION\n%s" % "\n".join(map(escape, page.summary))
    yield ".SH OPTIONS"
    yield from man_options(page.options)


def man_tool(name, version, top, commands):
    """`top` is the text that lists the commands; `commands` has their own by name."""
    yield from man_head(name, version, "starts, inspects, uses and ends a group of moed daemons",
                        top[0].split(": ", 1)[1])
    yield ".SH COMMANDS"
    for command, page in commands.items():
        yield ".SS %s" % escape(page.usage)
        yield "\n".join(map(escape, page.summary))
        yield from man_example(page.actions)
        yield from man_options(page.options)
        yield from man_example(page.examples)
    rest = [line for line in top[1:] if not COMMAND.match(line)]
    yield ".SH NOTES\n.nf\n%s\n.fi" % "\n".join(map(escape, rest)).strip("\n")


# --------------------------------------------------------------------- completion

VALUES = {"DIR": "-d", "FILE": "-f"}


def values_of(option):
    """Arguments of compgen for the option's value; "" if it cannot be known."""
    if "|" in option.value and option.value.islower():
        return "-W '%s'" % option.value.replace("|", " ")
    return VALUES.get(option.value, "")


def complete_options(page):
    """Lines of bash: the values of an option, else all words."""
    options = collections.defaultdict(list)  # by their values
    for o in page.options:
        if o.value:
            options[values_of(o)] += ["--" + o.name] + (["-" + o.letter] if o.letter else [])
    yield "case $before in"
    for values, names in options.items():
        answer = "_moed_words %s; " % values if values else ""
        yield "    %s) %sreturn ;;" % ("|".join(names), answer)
    yield "esac"
    words = [ACTION.match(line).group(1) for line in page.actions if not line.startswith("   ")]
    words += ["--" + o.name for o in page.options]
    yield "_moed_words -W '%s'" % " ".join(words)


HEAD = """# bash completion of %s; made from its --help
_moed_words() {
    mapfile -t COMPREPLY < <(compgen "$@" -- "$word")
    case $1 in -[df]) compopt -o filenames 2>/dev/null ;; esac
}
_%s() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
"""
TAIL = "}\ncomplete -F _%s %s\n"


def completion(name, body):
    function = name.replace("-", "_")
    lines = "".join("    %s\n" % line for line in body)
    return HEAD % (name, function) + lines + TAIL % (function, name)


def complete_tool(commands):
    yield "if [ \"$COMP_CWORD\" = 1 ]; then"
    yield "    _moed_words -W '%s help'" % " ".join(commands)
    yield "    return"
    yield "fi"
    yield "case ${COMP_WORDS[1]} in"
    for command, page in commands.items():
        yield "    %s)" % command
        for line in complete_options(page):
            yield "        " + line
        yield "        ;;"
    yield "    help) _moed_words -W '%s' ;;" % " ".join(commands)
    yield "esac"


def main(program, version, man_page, completion_file):
    name = os.path.basename(program)
    top = ask(program, "--help")
    if any(map(OPTION.match, top.splitlines())):
        page = parse(top)
        man, body = man_daemon(name, version, page), complete_options(page)
    else:
        lines = top.splitlines()
        names = [found.group(1) for found in map(COMMAND.match, lines) if found]
        commands = {n: parse(ask(program, n, "--help")) for n in names if n != "help"}
        man, body = man_tool(name, version, lines, commands), complete_tool(commands)
    with open(man_page, "w", encoding="utf-8") as file:
        file.write("\n".join(man) + "\n")
    with open(completion_file, "w", encoding="utf-8") as file:
        file.write(completion(name, body))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the man page of a program from what it prints for --help.

    manual.py PROGRAM VERSION FILE
"""

import sys

import program_help


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


def man_tool(name, version, tool):
    yield from man_head(name, version, "starts, inspects, uses and ends a group of moed daemons",
                        tool.lines[0].split(": ", 1)[1])
    yield ".SH COMMANDS"
    for command, page in tool.commands.items():
        yield ".SS %s" % escape(page.usage)
        yield "\n".join(map(escape, page.summary))
        yield from man_example(page.actions)
        yield from man_options(page.options)
        yield from man_example(page.examples)
    rest = [line for line in tool.lines[1:] if not program_help.COMMAND.match(line)]
    yield ".SH NOTES\n.nf\n%s\n.fi" % "\n".join(map(escape, rest)).strip("\n")


def main(program, version, path):
    found = program_help.read(program)
    man = (man_daemon(found.name, version, found.page) if found.page
           else man_tool(found.name, version, found))
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(man) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

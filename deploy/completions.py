#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes completions for zsh and fish from what programs print for --help.

    completions.py PROGRAM ZSH_FILE FISH_FILE

manual.py makes those for bash, and reads the help.
"""

import os
import sys

import manual

HELP = "Shows this text, or the options of a command."


def choices(option):
    """The words that an option takes; none if they cannot be known."""
    return option.value.split("|") if "|" in option.value and option.value.islower() else []


def actions(page):
    """(word, text) of each action of a command."""
    lines = [line.strip() for line in page.actions if not line.startswith("   ")]
    return [(line.split()[0], line.split("  ")[-1].strip()) for line in lines]


# ---------------------------------------------------------------------------- zsh


def zsh_text(text):
    text = text.replace("\\", "\\\\").replace("'", "'\\''")
    for mark in "[]:":
        text = text.replace(mark, "\\" + mark)
    return text


def zsh_value(option):
    if not option.value:
        return ""
    what = ("(%s)" % " ".join(choices(option)) if choices(option)
            else {"DIR": "_files -/", "FILE": "_files"}.get(option.value, " "))
    return ":%s:%s" % (zsh_text(option.value), what)


def zsh_arguments(page):
    """Lines: a call of _arguments for one page of help."""
    lines = ["_arguments -s"]
    for o in page.options:
        rest = "[%s]%s" % (zsh_text(o.text), zsh_value(o))
        lines.append("  '--%s%s'" % (o.name, rest))
        if o.letter:
            lines.append("  '-%s%s'" % (o.letter, rest))
    if actions(page):
        lines.append("  '1:action:(%s)'" % " ".join(word for word, _ in actions(page)))
    return [line + " \\" for line in lines[:-1]] + lines[-1:]


def zsh(name, pages, summaries):
    yield "#compdef %s" % name
    yield "# zsh completion of %s; made from its --help" % name
    if pages is None:
        yield from zsh_arguments(summaries)
        return
    yield "if (( CURRENT == 2 )); then"
    yield "    local -a commands=("
    for command, summary in summaries.items():
        yield "        '%s:%s'" % (command, zsh_text(summary))
    yield "    )"
    yield "    _describe command commands"
    yield "    return"
    yield "fi"
    yield "local command=$words[2]"
    yield "shift words"
    yield "(( CURRENT-- ))"
    yield "case $command in"
    for command, page in pages.items():
        yield "%s)" % command
        for line in zsh_arguments(page):
            yield "    " + line
        yield "    ;;"
    yield "help) _arguments '1:command:(%s)' ;;" % " ".join(pages)
    yield "esac"


# --------------------------------------------------------------------------- fish


def fish_text(text):
    return "'%s'" % text.replace("\\", "\\\\").replace("'", "\\'")


def fish_option(name, option, condition):
    line = "complete -c %s%s -l %s" % (name, condition, option.name)
    if option.letter:
        line += " -s %s" % option.letter
    if option.value:
        line += " -r"
        if choices(option):
            line += " -f -a %s" % fish_text(" ".join(choices(option)))
        elif option.value == "DIR":
            line += " -f -a '(__fish_complete_directories)'"
        elif option.value == "FILE":
            line += " -F"
        else:
            line += " -f"
    return line + " -d %s" % fish_text(option.text)


def fish(name, pages, summaries):
    yield "# fish completion of %s; made from its --help" % name
    yield "complete -c %s -f" % name
    if pages is None:
        for o in summaries.options:
            yield fish_option(name, o, "")
        return
    for command, summary in summaries.items():
        yield "complete -c %s -n __fish_use_subcommand -a %s -d %s" % (
            name, command, fish_text(summary))
    for command, page in pages.items():
        condition = " -n '__fish_seen_subcommand_from %s'" % command
        for word, text in actions(page):
            yield "complete -c %s%s -a %s -d %s" % (name, condition, word, fish_text(text))
        for o in page.options:
            yield fish_option(name, o, condition)
    yield "complete -c %s -n '__fish_seen_subcommand_from help' -a '%s'" % (name, " ".join(pages))


def main(program, zsh_file, fish_file):
    name = os.path.basename(program)
    top = manual.ask(program, "--help")
    lines = top.splitlines()
    if any(map(manual.OPTION.match, lines)):
        pages, summaries = None, manual.parse(top)
    else:
        summaries = {found.group(1): found.group(2)
                     for found in map(manual.COMMAND.match, lines) if found}
        pages = {command: manual.parse(manual.ask(program, command, "--help"))
                 for command in summaries if command != "help"}
        summaries["help"] = HELP
    for path, text in ((zsh_file, zsh), (fish_file, fish)):
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(text(name, pages, summaries)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes completions for bash, zsh and fish from what programs print for --help.

    completions.py PROGRAM BASH_FILE ZSH_FILE FISH_FILE
"""

import collections
import sys

import program_help
from program_help import actions, choices

HELP = "Shows this text, or the options of a command."


def summaries(program):
    """The text of each command, by its name."""
    return {**program.summaries, "help": HELP}


# --------------------------------------------------------------------------- bash

BASH_VALUES = {"DIR": "-d", "FILE": "-f"}


def bash_values(option):
    """Arguments of compgen for the option's value; "" if it cannot be known."""
    if choices(option):
        return "-W '%s'" % " ".join(choices(option))
    return BASH_VALUES.get(option.value, "")


def bash_options(page):
    """Lines of bash: the values of an option, else all words."""
    options = collections.defaultdict(list)  # by their values
    for o in page.options:
        if o.value:
            options[bash_values(o)] += ["--" + o.name] + (["-" + o.letter] if o.letter else [])
    yield "case $before in"
    for values, names in options.items():
        answer = "_moed_words %s; " % values if values else ""
        yield "    %s) %sreturn ;;" % ("|".join(names), answer)
    yield "esac"
    words = [word for word, _ in actions(page)]
    words += ["--" + o.name for o in page.options]
    yield "_moed_words -W '%s'" % " ".join(words)


BASH_HEAD = """# bash completion of %s; made from its --help
_moed_words() {
    mapfile -t COMPREPLY < <(compgen "$@" -- "$word")
    case $1 in -[df]) compopt -o filenames 2>/dev/null ;; esac
}
_%s() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()"""
BASH_TAIL = "}\ncomplete -F _%s %s"


def bash_tool(commands):
    yield "if [ \"$COMP_CWORD\" = 1 ]; then"
    yield "    _moed_words -W '%s help'" % " ".join(commands)
    yield "    return"
    yield "fi"
    yield "case ${COMP_WORDS[1]} in"
    for command, page in commands.items():
        yield "    %s)" % command
        for line in bash_options(page):
            yield "        " + line
        yield "        ;;"
    yield "    help) _moed_words -W '%s' ;;" % " ".join(commands)
    yield "esac"


def bash(program):
    body = bash_options(program.page) if program.page else bash_tool(program.commands)
    function = program.name.replace("-", "_")
    yield BASH_HEAD % (program.name, function)
    for line in body:
        yield "    " + line
    yield BASH_TAIL % (function, program.name)


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


def zsh(program):
    yield "#compdef %s" % program.name
    yield "# zsh completion of %s; made from its --help" % program.name
    if program.page:
        yield from zsh_arguments(program.page)
        return
    yield "if (( CURRENT == 2 )); then"
    yield "    local -a commands=("
    for command, summary in summaries(program).items():
        yield "        '%s:%s'" % (command, zsh_text(summary))
    yield "    )"
    yield "    _describe command commands"
    yield "    return"
    yield "fi"
    yield "local command=$words[2]"
    yield "shift words"
    yield "(( CURRENT-- ))"
    yield "case $command in"
    for command, page in program.commands.items():
        yield "%s)" % command
        for line in zsh_arguments(page):
            yield "    " + line
        yield "    ;;"
    yield "help) _arguments '1:command:(%s)' ;;" % " ".join(program.commands)
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


def fish(program):
    name = program.name
    yield "# fish completion of %s; made from its --help" % name
    yield "complete -c %s -f" % name
    if program.page:
        for o in program.page.options:
            yield fish_option(name, o, "")
        return
    for command, summary in summaries(program).items():
        yield "complete -c %s -n __fish_use_subcommand -a %s -d %s" % (
            name, command, fish_text(summary))
    for command, page in program.commands.items():
        condition = " -n '__fish_seen_subcommand_from %s'" % command
        for word, text in actions(page):
            yield "complete -c %s%s -a %s -d %s" % (name, condition, word, fish_text(text))
        for o in page.options:
            yield fish_option(name, o, condition)
    yield "complete -c %s -n '__fish_seen_subcommand_from help' -a '%s'" % (
        name, " ".join(program.commands))


def main(program, *paths):
    found = program_help.read(program)
    for path, text in zip(paths, (bash, zsh, fish)):
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(text(found)) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])

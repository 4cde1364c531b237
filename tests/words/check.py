# SPDX-License-Identifier: Apache-2.0
"""Refuses words that the project has given up: old_words.txt lists them, with the new word for
each.

    check.py [--list FILE] [ROOT]

Prints `file:line: "old": write new` for each place and exits with 1 if there is one.
Exit status 2: the list itself is wrong.
"""

import argparse
import bisect
import pathlib
import re
import sys

# Product code, tests and documents. Recorded data is not text of ours.
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".proto", ".py", ".cmake", ".txt", ".md", ".sh", ".in"}
SKIPPED = ("build", ".git", "tests/words", "tests/golden/data", "CHANGELOG.md")

HERE = pathlib.Path(__file__).resolve().parent

# Comments and strings, of which only one kind is prose in each language.
C_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<text>"(?:[^"\\\n]|\\.)*")|'(?:[^'\\\n]|\\.)*'""", re.S
)
HASH_TOKENS = re.compile(
    r"""(?P<comment>\#[^\n]*|\"{3}.*?\"{3})|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""",
    re.S)


class ListError(Exception):
    """A line of the list that cannot be understood."""


class Rule:
    """One line of the list."""

    def __init__(self, old, new, folders, prose):
        # A word is not part of a longer one; `_` and digits separate words, as identifiers do.
        spaced = old.replace(" ", r"[\s*/#\"]+")
        if re.search(r"(?<!\\)[A-Z]", old):
            raise ListError(f"write it in lower case: {old}")
        try:
            self.likely = re.compile(spaced)  # much faster, as it may begin with a plain letter
            self.pattern = re.compile(f"(?<![a-z])(?:{spaced})(?![a-z])")
        except re.error as e:
            raise ListError(f"not a regular expression: {old}: {e}") from e
        self.new = new
        self.prose = prose
        paths = folders.split()
        self.folders = [f for f in paths if not f.startswith("!")]
        self.but = [f[1:] for f in paths if f.startswith("!")]

    def places(self, text):
        """Offsets and spellings in `text`, which is in lower case."""
        if self.likely.search(text):
            for hit in self.pattern.finditer(text):
                yield hit.start(), " ".join(hit.group().split())

    def covers(self, path):
        return lies_in(path, self.folders) and not lies_in(path, self.but)


def lies_in(path, folders):
    return any(f in ("*", path) or path.startswith(f.rstrip("/") + "/") for f in folders)


def parse_line(line, finished, prose):
    parts = re.fullmatch(r"(.+?) +-> +(.+?)(?: +@ +(\S.*))?", line)
    if parts is None:
        raise ListError(f'not "old -> new @ FOLDER ...": {line}')
    old, new, folders = parts.groups()
    if folders is None:
        if not prose:
            raise ListError(f"folders are missing: {line}")
        return Rule(old, new, " ".join(finished), prose)
    return Rule(old, new, folders, prose)


def parse_list(text):
    """Sections: [finished] folders, [words] for all text, [phrases] for prose."""
    section, finished, rules = None, [], []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if line in ("[finished]", "[words]", "[phrases]"):
                section = line
            elif section == "[finished]":
                finished.append(line)
            elif section is None:
                raise ListError("a line before the first section")
            else:
                rules.append(parse_line(line, finished, section == "[phrases]"))
        except ListError as e:
            raise ListError(f"line {number}: {e}") from e
    return finished, rules


def prose_of(path, text):
    """`text` with everything blanked but comments and strings; line breaks stay."""
    if path.endswith(".md"):
        return text
    c_like = path.endswith((".c", ".h", ".cu", ".cuh", ".proto"))
    kept, at = [], 0
    for token in (C_TOKENS if c_like else HASH_TOKENS).finditer(text):
        if token.lastgroup is None:
            continue
        kept.append(re.sub(r"[^\n]", " ", text[at : token.start()]))
        kept.append(token.group())
        at = token.end()
    return "".join(kept)


def check_file(path, text, rules):
    starts = [m.end() for m in re.finditer("\n", text)]
    prose = None
    for rule in rules:
        if rule.prose and prose is None:
            prose = prose_of(path, text)
        for at, old in rule.places(prose if rule.prose else text):
            yield bisect.bisect_right(starts, at) + 1, old, rule.new


def check_names(path, rules):
    for rule in rules:
        if not rule.prose:
            for _, old in rule.places(path.rsplit("/", 1)[-1].lower()):
                yield 0, f"{old} (in the file's name)", rule.new


def sources(root):
    pending = [root]
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            path = entry.relative_to(root).as_posix()
            if lies_in(path, SKIPPED) or entry.is_symlink():
                continue
            if entry.is_dir():
                pending.append(entry)
            elif entry.suffix in SUFFIXES:
                yield path, entry


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--list", type=pathlib.Path, default=HERE / "old_words.txt")
    arguments.add_argument("root", nargs="?", type=pathlib.Path, default=HERE.parent.parent)
    given = arguments.parse_args()
    try:
        finished, rules = parse_list(given.list.read_text())
        for folder in finished:
            if not (given.root / folder).exists():
                raise ListError(f"[finished] names {folder}, which does not exist")
    except ListError as e:
        print(f"{given.list}: {e}", file=sys.stderr)
        return 2
    found = seen = 0
    for path, entry in sources(given.root):
        mine = [r for r in rules if r.covers(path)]
        if not mine:
            continue
        seen += 1
        text = entry.read_text().lower()
        for line, old, new in [*check_names(path, mine), *check_file(path, text, mine)]:
            print(f'{path}:{line}: "{old}": write {new}')
            found += 1
    print(f"{seen} files, {len(rules)} rules, {found} old words")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

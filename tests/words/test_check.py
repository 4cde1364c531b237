# SPDX-License-Identifier: Apache-2.0
"""check.py finds what it must find, and only that."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parent / "check.py"

LIST = """
[finished]
done
[words]
crews? -> thread_pool @ *
seat -> member @ done open !open/seat.c
[phrases]
whose -> say it in two sentences
of its own -> leave it out
"""


class Check(unittest.TestCase):
    def run_on(self, files, words=LIST):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "done").mkdir()
            (root / "list").write_text(words)
            for path, text in files.items():
                (root / path).parent.mkdir(exist_ok=True)
                (root / path).write_text(text)
            done = subprocess.run(
                [sys.executable, "-B", CHECK, "--list", root / "list", root],
                capture_output=True,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout + done.stderr

    def test_a_clean_tree_passes(self):
        code, text = self.run_on({"done/a.c": "int thread_pool; /* screwed */\n"})
        self.assertEqual(code, 0, text)
        self.assertIn("1 files", text)

    def test_parts_of_identifiers_are_words(self):
        code, text = self.run_on({"open/a.c": "\nint moe_CREW_run;\n"})
        self.assertEqual(code, 1)
        self.assertIn('open/a.c:2: "crew": write thread_pool', text)

    def test_names_of_files_count(self):
        code, text = self.run_on({"done/crews.h": ""})
        self.assertEqual(code, 1)
        self.assertIn("done/crews.h:0:", text)

    def test_a_folder_or_file_can_be_left_out(self):
        self.assertEqual(self.run_on({"other/a.c": "seat", "open/seat.c": "seat"})[0], 0)
        self.assertEqual(self.run_on({"open/a.c": "seat"})[0], 1)

    def test_phrases_are_looked_for_in_prose_of_finished_folders(self):
        prose = "int a; /* a thing of its\n * own */\n"
        code, text = self.run_on({"done/a.c": prose})
        self.assertEqual(code, 1)
        self.assertIn("done/a.c:1:", text)
        self.assertEqual(self.run_on({"open/a.c": prose})[0], 0)
        self.assertEqual(self.run_on({"done/a.c": "int whose;\n"})[0], 0)
        self.assertEqual(self.run_on({"done/a.c": 'fail("a call whose end is near");'})[0], 1)
        self.assertEqual(self.run_on({"done/a.py": "x = 1  # whose\n"})[0], 1)
        self.assertEqual(self.run_on({"done/README.md": "A thing whose end is near.\n"})[0], 1)

    def test_a_list_that_makes_no_sense_is_refused(self):
        for words in ("crew -> x @ *", "[words]\ncrew", "[words]\n( -> x @ *", "[finished]\ngone",
                      "[words]\nA -> x @ *"):
            code, text = self.run_on({}, words)
            self.assertEqual(code, 2, words)
            self.assertIn("list: ", text)


if __name__ == "__main__":
    unittest.main()

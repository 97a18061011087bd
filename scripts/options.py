"""Options of a command; misuse is answered with one line, not with a page of usage."""

import argparse


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong and nothing else; --help has the rest."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog.split()[0]}: error: {message} (--help lists all)\n")

#!/usr/bin/env python3
"""Build the container image and look after its cache (`make image`, `make clean-cache`).

Standard library only, Python 3.8 or newer: it runs on login nodes.
"""

import sys
from argparse import Namespace
from pathlib import Path

from imagebuild import build as image_build
from imagebuild.content import image_key, read_inputs
from imagebuild.process import BuildError, catch_signals, error_lines, remove_tree
from options import Parser

ROOT = Path(__file__).resolve().parent.parent


def parse(arguments: "list[str] | None" = None) -> Namespace:
    parser = Parser(prog="image.py", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("build", "build the image, if an input changed"),
        ("key", "print its content key"),
    ):
        command = verbs.add_parser(verb, help=text)
        command.add_argument("--flavour", default="cpu", help="cpu (default: %(default)s)")
        command.add_argument(
            "--suite", default="bookworm", help="Debian suite (default: %(default)s)"
        )
        command.add_argument("--base", default="auto", choices=("auto", "docker", "debian"),
                             help="where Debian comes from (default: %(default)s)")  # fmt: skip
        command.add_argument("--torchvision", default="auto", metavar="auto|none|VERSION",
                             help="auto: where PyTorch's index is in reach")  # fmt: skip
        command.add_argument("--out", type=Path, help="default: build/Pytorch_DL_HPC-FLAVOUR.sif")
        command.add_argument("--refresh", action="store_true", help="use no cached base and layer")
    verbs.add_parser("clean-cache", help="remove cached base systems, wheels and layers")
    return parser.parse_args(arguments)


def main() -> int:
    given = parse()
    catch_signals()
    try:
        if given.verb == "clean-cache":
            cache = image_build.cache_directory()
            remove_tree(cache)
            return int(cache.exists())
        output = given.out or ROOT / "build" / f"Pytorch_DL_HPC-{given.flavour}.sif"
        options = image_build.Options(
            ROOT,
            given.flavour,
            given.suite,
            given.base,
            given.torchvision,
            output.absolute(),
            given.refresh,
        )
        if given.verb == "key":
            print(image_key(read_inputs(ROOT, given.flavour), options.choices()))
        else:
            image_build.build(options)
    except (BuildError, OSError) as error:
        for line in error_lines(error):
            print(f"image: error: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as signal:
        print(f"image: stopped by {signal or 'SIGINT'}; nothing was changed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

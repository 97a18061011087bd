#!/usr/bin/env bash
# Pin what *.in ask for, with hashes, by uv. No lock names an index: hosts have their own.
# UV and its settings (UV_FIND_LINKS, UV_DEFAULT_INDEX …) may be set; torch-*.txt stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON_VERSION:-3.11} # of the image's Debian

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
if [[ -z ${UV:-} ]]; then
    python3 -m venv "$tools/venv"
    "$tools/venv/bin/pip" install --quiet --require-hashes -r payload/requirements/build.txt
    UV=$tools/venv/bin/uv
fi

lock() { # lock IN OUT [OPTIONS]
    "$UV" pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links \
        --python-version "$python" --custom-compile-command "make lock" "$1" -o "$tools/lock" "${@:3}"
    { echo "# --python-version $python"; cat "$tools/lock"; } > "$2.new"
    mv "$2.new" "$2"
    rm "$tools/lock"
    echo "locked $2"
}

lock payload/requirements/build.in payload/requirements/build.txt
lock payload/requirements/cpu.in payload/requirements/cpu.txt
lock tests/requirements.in tests/requirements.txt --universal

#!/usr/bin/env bash
# Makes the environment: install.sh PYTHON VENV EXTRA. Called by `make setup`; safe to run again.
set -euo pipefail

python=$1 venv=$2 extra=$3
lock="requirements/$extra.lock"
say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
began=$SECONDS

command -v "$python" >/dev/null || fail "no $python on PATH: install Python 3.11, or say make setup PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ -f "$lock" ] && [ "$version" != 3.11 ]; then
    fail "$lock is for Python 3.11 and $python is $version: say make setup PYTHON=/path/to/python3.11"
fi

if [ ! -x "$venv/bin/python" ]; then
    say "making $venv with Python $version"
    "$python" -m venv "$venv" || fail "python -m venv failed (Debian: apt-get install python3-venv)"
fi

# The allocator that vLLM wants under it on CPU. Without it everything works, about a quarter slower.
install_tcmalloc() {
    if ldconfig -p | grep -q libtcmalloc_minimal.so.4; then return; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing libtcmalloc-minimal4 (apt)"
        if (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y libtcmalloc-minimal4) \
            >"$venv/apt.log" 2>&1; then return; fi
        say "apt could not install it; its log: $venv/apt.log"
    fi
    say "no libtcmalloc-minimal4: CPU engines run about 25 % slower (Debian: apt-get install libtcmalloc-minimal4)"
}
[ "$extra" = cpu ] && { install_tcmalloc & }

[ -x "$venv/bin/uv" ] || { say "installing uv"; "$venv/bin/python" -m pip install --quiet "uv>=0.9"; }

started=$SECONDS
if [ -f "$lock" ]; then
    say "installing $(grep -c '^[a-z0-9].*==' "$lock") packages from $lock (about 4 GB)"
    "$venv/bin/uv" pip sync --quiet --python "$venv/bin/python" --require-hashes "$lock"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --editable .
else
    say "no $lock: resolving the extra '$extra' for this machine"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --editable ".[bench,$extra,notebooks,dev]"
fi
wait
# `workbench up` tells these seconds when the same make started both.
echo "$((SECONDS - began)) $PPID" >"$venv/setup-seconds"
say "ready in $((SECONDS - started)) s: $venv/bin/workbench --help"

#!/usr/bin/env bash
# Make `apptainer` usable on this machine, and prove it by running a container.
#
# Where apptainer or singularity works already, nothing is changed. Elsewhere root installs it by the first of these
# that is possible, and an ordinary user is told what to ask the administrator for:
#   1. the distribution's package (apt, dnf with EPEL, zypper);
#   2. upstream's release package, checked against a SHA-256, where upstream can be reached;
#   3. Debian 13 and later: the package of Debian sid, pinned so that nothing else comes from sid;
#   4. Debian 12: the same package, repacked with a C library of its own.
# The system's C library is never upgraded. For tests, SETUP_APPTAINER_ROOT is put before /etc, /dev, /run, /proc/sys.
set -euo pipefail
umask 022
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

readonly UPSTREAM=https://github.com/apptainer/apptainer
readonly UPSTREAM_API=https://api.github.com/repos/apptainer/apptainer
readonly UPSTREAM_VERSION=1.5.3
# Of apptainer_1.5.3_amd64.deb. Upstream publishes no checksum file; this is the digest of the release's asset.
readonly UPSTREAM_SHA256=82b0bdddf459087d202383360b8318d526ad6826c748a2f669913cc6aef9ee40
# What apptainer calls. Debian's package depends on the first two only; without squashfuse every start unpacks the
# whole image, without fuse2fs and gocryptfs every start says that they are missing.
readonly HELPERS=(squashfs-tools uidmap fuse3 squashfuse fuse2fs gocryptfs fuse-overlayfs e2fsprogs fakeroot)

root=${SETUP_APPTAINER_ROOT:-}
engine='' version='' exec_mode='' exec_error='' build_error=''

usage() {
  cat <<'USAGE'
usage: setup-apptainer.sh [--check]
  (none)   if no apptainer or singularity works here, install apptainer (needs root); run a container
  --check  run a container and name what is missing; change nothing
exit: 0 if a container runs, 1 if not
USAGE
}

say() { printf '%s\n' "$*"; }
changed() { say "changed: $*"; }
note() { say "note: $*"; }
fail() { # fail SEEN WANTED COMMAND...
  printf 'error: seen:   %s\n       wanted: %s\n' "$1" "$2" >&2
  printf '       do:     %s\n' "${@:3}" >&2
  exit 1
}
is_root() { [ "$(id -u)" = 0 ]; }

# ---- proof -----------------------------------------------------------------------------------------------------

make_container() { # make_container DIR: this machine's own shell and its libraries; no network
  local file
  mkdir -p "$1"/{bin,dev,etc,proc,root,sys,tmp,var/tmp}
  echo 'root:x:0:0:root:/root:/bin/sh' >"$1/etc/passwd"
  echo 'root:x:0:' >"$1/etc/group"
  cp -L /bin/sh "$1/bin/sh"
  for file in $(ldd /bin/sh 2>/dev/null | grep -o '/[^ )]*' || true); do # a static shell has none
    mkdir -p "$1${file%/*}"
    cp -L "$file" "$1$file"
  done
  "$1/bin/sh" -c : 2>/dev/null ||
    fail "programs in ${1%/*} cannot be executed" 'a temporary directory without noexec' "TMPDIR=/var/tmp $0"
}

run_engine() { # quiet and patient; what the user's own settings would bind is not under test
  (
    unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,OVERLAY}
    cd / && APPTAINER_CONFIGDIR=$work/config timeout 120 "$engine" "$@" </dev/null
  )
}

run_container() { # run_container IMAGE: print how the container's users map to those outside
  # shellcheck disable=SC2016 # the container's shell expands it
  run_engine exec --contain --no-home --pwd / "$1" /bin/sh -c 'read -r map </proc/self/uid_map && echo ran $map'
}

last_words() { # of a log of the engine, without its colours
  local words
  words=$(grep -E 'ERROR|FATAL' "$1" || cat "$1")
  tail -n 2 <<<"$words" | sed 's/\x1b\[[0-9;]*m//g' | paste -sd' '
}

prove_exec() { # run a container with the first engine that can: sets exec_mode, or exec_error
  local name found outside inside seen
  outside=$(awk '{print "ran", $1, $2, $3}' /proc/self/uid_map)
  exec_mode='' exec_error=''
  for name in apptainer singularity; do
    found=$(command -v "$name") || continue
    engine=$found
    version=$(timeout 20 "$engine" --version 2>&1 </dev/null | head -n 1) || true
    inside=''
    if [[ $version != *' version '* ]]; then # a game is called singularity, too
      seen="$engine --version says: $version"
    elif ! inside=$(run_container "$work/container" 2>"$work/exec.log"); then
      seen="$engine exec says: $(last_words "$work/exec.log")"
    else
      seen="$engine exec printed: $inside"
    fi
    case $inside in
      "$outside") exec_mode=$(is_root && echo root || echo 'setuid root') && return 0 ;;
      ran*) exec_mode='user namespace' && return 0 ;;
      *) exec_error=${exec_error:-$seen} ;;
    esac
  done
  exec_error=${exec_error:-neither apptainer nor singularity is on PATH}
  return 1
}

prove_build() { # an image file built with --fakeroot must run: sets build_error
  local image=$work/proof.sif
  rm -f "$image"
  printf 'Bootstrap: localimage\nFrom: %s\n%%post\n    echo built >/built\n' "$work/container" >"$work/proof.def"
  build_error=''
  if ! run_engine build --fakeroot "$image" "$work/proof.def" >"$work/build.log" 2>&1; then
    build_error="$engine build --fakeroot says: $(last_words "$work/build.log")"
  elif ! run_container "$image" >/dev/null 2>"$work/build.log"; then
    build_error="$engine exec of an image file says: $(last_words "$work/build.log")"
  fi
}

prove() { prove_exec && prove_build; }

report() { # report WORD: one line about what works
  local build='build --fakeroot'
  [ -z "$build_error" ] || build='but not build --fakeroot'
  say "$version $1 ($engine): exec as $exec_mode, $build"
}

# ---- the host: what apptainer needs from a machine, whoever installed it ------------------------------------------

lacks_range() { ! grep -qsE "^($(id -un)|$(id -u)):" "$root/etc/$1"; } # lacks_range subuid|subgid

range_command() { # the command that gives the missing ranges, behind all that are taken; useradd starts there, too
  local range options=''
  range=$(cat "$root/etc/subuid" "$root/etc/subgid" 2>/dev/null |
    awk -F: 'BEGIN {start = 100000} $2 + $3 > start {start = $2 + $3} END {print start "-" start + 65535}')
  if lacks_range subuid; then options+=" --add-subuids $range"; fi
  if lacks_range subgid; then options+=" --add-subgids $range"; fi
  [ -z "$options" ] || echo "usermod$options $(id -un)"
}

fuse_is_closed() { # the user's own processes mount images, so that every user must be able to open it
  [ ! -e "$root/dev/fuse" ] || (((8#$(stat -c %a "$root/dev/fuse") & 8#6) != 8#6))
}

name_bad_sysctl() { # name_bad_sysctl KEY BAD COMMAND
  local value
  value=$(cat "$root/proc/sys/$1" 2>/dev/null) || return 0
  [ "$value" != "$2" ] || note "${1//\//.} is $2, which forbids user namespaces: $3 (to keep it: /etc/sysctl.d)"
}

name_host_problems() { # one line for each, with the command that ends it
  local command
  name_bad_sysctl user/max_user_namespaces 0 'sysctl -w user.max_user_namespaces=15000'
  name_bad_sysctl kernel/unprivileged_userns_clone 0 'sysctl -w kernel.unprivileged_userns_clone=1'
  name_bad_sysctl kernel/apparmor_restrict_unprivileged_userns 1 \
    'an AppArmor profile for apptainer with "userns,", or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0'
  command=$(range_command)
  [ -z "$command" ] || note "$(id -un) has no range in /etc/subuid and /etc/subgid for build --fakeroot: $command"
  if [ ! -e "$root/dev/fuse" ]; then
    note '/dev/fuse is missing: modprobe fuse (in another container: start that one with --device /dev/fuse)'
  elif fuse_is_closed; then
    note '/dev/fuse is not open to every user (on most machines udev sees to it): chmod 0666 /dev/fuse'
  fi
  if grep -qs 'Requesting capability set' "$work/exec.log"; then
    note 'root lacks a capability here: apptainer exec --userns, or export APPTAINER_USERNS=1'
  fi
}

fix_host() { # as root: end what name_host_problems names, but leave the kernel's settings to the administrator
  local command
  command=$(range_command)
  if [ -n "$command" ] && touch "$root/etc/subuid" "$root/etc/subgid" && $command; then
    changed "$command (for build --fakeroot; undo with --del-subuids and --del-subgids)"
  fi
  [ -e "$root/dev/fuse" ] || modprobe fuse 2>/dev/null || true
  if [ -e "$root/dev/fuse" ] && fuse_is_closed && chmod 0666 "$root/dev/fuse" 2>/dev/null; then
    changed 'chmod 0666 /dev/fuse, until the next boot (on most machines udev sees to it)'
  fi
}

# In containers and small virtual machines root often lacks CAP_SYS_RESOURCE. Apptainer gives a container of root every
# capability and stops if it cannot; its configuration may list them instead, and then a plain `apptainer exec` works.
# `apptainer build` has no such setting: root, too, says --fakeroot.
spare_sys_resource() {
  grep -qs 'Requesting capability set' "$work/exec.log" || return 1
  "$engine" capability add --user root all >"$work/log" 2>&1 &&
    "$engine" capability drop --user root CAP_SYS_RESOURCE >"$work/log" 2>&1 &&
    "$engine" config global --set 'root default capabilities' file >"$work/log" 2>&1 || return 1
  changed 'root default capabilities = file (apptainer.conf), with all but CAP_SYS_RESOURCE (capability.json), which' \
    "root lacks here (undo: apptainer config global --set 'root default capabilities' full)"
}

# ---- routes ----------------------------------------------------------------------------------------------------

apt_get() { apt-get -q -o DPkg::Lock::Timeout=600 "$@" 9>&-; }

update_lists() { # the timeout does not cover the lists' own lock; another repository's failure is not our matter
  local try
  for try in 1 2 3 4 5 6; do
    if apt_get update >"$work/log" 2>&1; then return; fi
    grep -q 'Could not get lock' "$work/log" || break
    sleep $((try * 5))
  done
  note "apt-get update: $(grep '^E:' "$work/log" | paste -sd' ')"
}

has_candidate() { apt-cache policy "$1" | grep 'Candidate:' | grep -qv '(none)'; }

apt_get_unasked() { # with yes to all questions, and the administrator's configuration files kept
  set -- -y -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@"
  if apt_get "$@" >"$work/log" 2>&1; then return 0; fi
  # Was an earlier installation interrupted, this script's own perhaps? Then apt asks to finish that one first.
  grep -q 'dpkg --configure -a' "$work/log" || return 1
  dpkg --configure -a >"$work/log" 2>&1 9>&- || true
  apt_get "$@" >"$work/log" 2>&1
}

apt_install() { # apt_install PACKAGE|FILE: with HELPERS, all or nothing; the C library stays, nothing is removed
  local helper plan new packages=("$1")
  for helper in "${HELPERS[@]}"; do # no distribution has to have them all
    if has_candidate "$helper"; then packages+=("$helper"); fi
  done
  set -- --no-remove --no-install-recommends install "${packages[@]}"
  if ! plan=$(apt_get -s "$@" 2>&1); then
    say "apt cannot install $(basename "${packages[0]}"): $(grep -E '^E:|Depends' <<<"$plan" | paste -sd' ')"
    return 1
  fi
  new=$(awk '$1 == "Inst" {print $2}' <<<"$plan" | paste -sd' ')
  if [[ " $new " =~ \ (libc6|libc-bin)[:\ ] ]]; then
    say "apt would replace the C library for $(basename "${packages[0]}"): left alone"
    return 1
  fi
  if ! apt_get_unasked "$@"; then
    say "apt-get install: $(tail -n 3 "$work/log" | paste -sd' ')"
    return 1
  fi
  [ -z "$new" ] || changed "packages installed: $new (undo: apt-get purge, with these names)"
}

install_from_distribution() {
  local before
  if command -v apt-get >/dev/null; then
    update_lists
    has_candidate apptainer || { say 'the distribution has no package apptainer' && return 1; }
    apt_install apptainer
  elif command -v dnf >/dev/null; then # EPEL has it for RHEL and its relatives
    before=$(rpm -qa | sort)
    { dnf -y install --exclude='glibc*' apptainer || {
      dnf -y install epel-release && dnf -y install --exclude='glibc*' apptainer
    }; } >"$work/log" 2>&1 || { tail -n 3 "$work/log" && return 1; }
    changed "packages installed: $(comm -13 <(echo "$before") <(rpm -qa | sort) | paste -sd' ') (undo: dnf remove)"
  elif command -v zypper >/dev/null; then
    zypper --non-interactive install --no-recommends apptainer >"$work/log" 2>&1 ||
      { tail -n 3 "$work/log" && return 1; }
    changed 'packages installed: apptainer and what it needs (undo: zypper remove --clean-deps apptainer)'
  else
    say 'no apt-get, dnf or zypper here' && return 1
  fi
}

download() { # download URL FILE SECONDS: gives up soon where there is no way out
  if command -v curl >/dev/null; then
    curl -fsSL --proto '=https' --connect-timeout 5 --max-time "$3" -o "$2" "$1" 2>/dev/null
  else
    timeout "$3" wget -q --https-only --tries=1 --connect-timeout=5 -O "$2" "$1" 2>/dev/null
  fi
}

# Not tried on the project's test machine, which cannot reach upstream. Upstream packages amd64 alone: built on
# Debian 11, and once more ("-trixie+") where libfuse3-3 has become libfuse3-4; for that one the API tells the digest.
install_from_upstream() {
  local file=apptainer_${UPSTREAM_VERSION}_amd64.deb sha256=$UPSTREAM_SHA256 release=v$UPSTREAM_VERSION
  if ! command -v dpkg >/dev/null || [ "$(dpkg --print-architecture)" != amd64 ]; then
    say 'upstream has no package for this machine' && return 1
  fi
  if ! has_candidate libfuse3-3; then
    file=apptainer_${UPSTREAM_VERSION}-trixie+_amd64.deb
    download "$UPSTREAM_API/releases/tags/$release" "$work/release.json" 15 || true
    sha256=$(sed 's/[,{]/\n/g' "$work/release.json" 2>/dev/null | awk -F'"' -v file="$file" \
      '$2 == "name" {name = $4} $2 == "digest" && name == file {print substr($4, 8)}') || true
  fi
  if [ -z "$sha256" ] || ! download "$UPSTREAM/releases/download/$release/${file/+/%2B}" "$work/$file" 300; then
    say 'upstream cannot be reached: trying the next way' && return 1
  fi
  if ! sha256sum --status -c <<<"$sha256  $work/$file"; then
    say "$file: its SHA-256 is not $sha256: not installed" && return 1
  fi
  apt_install "$work/$file"
}

print_sources() { # print_sources SUITES: from the mirror that this machine uses already, signed by Debian's keys
  local mirror
  # shellcheck disable=SC2016 # apt expands it
  mirror=$(apt-get indextargets --format '$(ORIGIN)|$(COMPONENT)|$(CODENAME)|$(REPO_URI)' 'Created-By: Packages' |
    awk -F'|' -v name="${VERSION_CODENAME:-}" '$1 == "Debian" && $2 == "main" && $3 == name {print $4}' |
    grep -vE -m1 '^(cdrom|file):') || { say 'apt has no mirror of Debian configured' >&2 && return 1; }
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$mirror" "$1" \
    /usr/share/keyrings/debian-archive-keyring.gpg
}

install_pinned_sid() {
  local pin=$root/etc/apt/preferences.d/apptainer-sid.pref sources=$root/etc/apt/sources.list.d/apptainer-sid.sources
  print_sources sid >"$work/sources" || return 1
  printf 'Package: %s\nPin: release n=sid\nPin-Priority: %d\n\n' '*' -1 apptainer 500 >"$work/pin"
  # The pin first: sid must at no moment be there without it.
  mkdir -p "${pin%/*}" "${sources%/*}" && mv "$work/pin" "$pin" && mv "$work/sources" "$sources" || return 1
  update_lists
  if apt_install apptainer; then
    changed "$sources and $pin: Debian sid, for apptainer alone (undo: remove both files)"
  else
    rm -f "$sources" "$pin"
    return 1
  fi
}

private_apt() { # private_apt ARGUMENT...: apt-get with a state of its own, so that sid never enters the system's
  apt_get -o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt" \
    -o Dir::Etc::SourceList="$work/apt/debian.sources" -o Dir::Etc::SourceParts=- -o Acquire::Languages=none \
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=- -o APT::Default-Release= "$@"
}

install_with_private_libraries() {
  local suite
  chmod 755 "$work" # apt downloads as a user of its own
  mkdir -p "$work"/apt/{lists,archives}/partial "$work/debs"
  : >"$work/apt/status"
  print_sources 'trixie sid' >"$work/apt/debian.sources" || return 1
  (
    cd "$work/debs" && private_apt update && private_apt download apptainer/sid &&
      { command -v patchelf || { apt_get download patchelf && dpkg-deb -x patchelf_*.deb "$work/patchelf"; }; }
  ) >"$work/log" 2>&1 || { tail -n 3 "$work/log" && return 1; }
  for suite in trixie sid; do # the stable libraries, unless sid's apptainer needs newer ones
    repack_with_libraries "$suite" >"$work/repack.log" 2>&1 || continue
    apt_install "$work/apptainer.deb" || return 1
    note "this apptainer has its own C library, of Debian $suite, which apt does not renew (purge apptainer and run" \
      'this script again). An overlay inside an image file needs a newer system; an overlay beside it works.'
    return 0
  done
  say "sid's apptainer does not run with libraries of its own: $(tail -n 1 "$work/repack.log")" && return 1
}

# The loader and the search path written into the programs lead to the package's own directory: nothing else on the
# system sees these libraries. Being a package, dpkg installs it as a whole and removes it as a whole.
repack_with_libraries() ( # repack_with_libraries SUITE
  tree=$work/tree-$1 libs=$work/libs-$1
  patchelf=$(command -v patchelf || echo "$work/patchelf/usr/bin/patchelf")
  mkdir -p "$libs" && dpkg-deb -R "$work"/debs/apptainer_*.deb "$tree" && cd "$tree" || exit
  home=$(echo usr/lib/*/apptainer) # usr/lib/x86_64-linux-gnu/apptainer, and so on
  private=$home/private loader=$private/$(basename "$("$patchelf" --print-interpreter usr/bin/apptainer)")
  mapfile -t needed < <(sed -n 's/^Depends: //p' DEBIAN/control | tr , '\n' | sed -n -E "s,^ *(lib[^ ]+).*,\1/$1,p")
  (cd "$libs" && private_apt download "${needed[@]}") || exit
  for deb in "$libs"/*.deb; do
    dpkg-deb -x "$deb" "$libs/root" || exit
  done
  mkdir "$private" && cp -a "$libs/root/${home%/*}"/*.so* "$private" || exit
  for program in usr/bin/apptainer "$home"/bin/starter*; do
    "$patchelf" --set-interpreter "/$loader" --force-rpath --set-rpath "/$private" "$program" || exit
  done
  "$loader" --library-path "$private" usr/bin/apptainer --version &&
    sed -i -E '/^Depends:/s/ lib[^,]*(,|$)//g; /^Depends:/s/, *$//; s/^Version: .*/&~privatelibs/' DEBIAN/control &&
    rm -f DEBIAN/md5sums && dpkg-deb --root-owner-group -Znone -b . "$work/apptainer.deb"
)

install_apptainer() {
  local route routes=(install_from_distribution install_from_upstream)
  case $ID:${VERSION_ID:-} in # testing and unstable have no number
    debian:[1-9] | debian:1[01]) ;;
    debian:12) routes+=(install_with_private_libraries) ;;
    debian:*) routes+=(install_pinned_sid install_with_private_libraries) ;;
  esac
  for route in "${routes[@]}"; do
    if $route; then return 0; fi
  done
  fail "none of the ways to install apptainer on ${PRETTY_NAME:-$ID} worked (above)" 'one that does' \
    'on Ubuntu:  add-apt-repository -y ppa:apptainer/ppa && apt-get install -y apptainer' \
    "elsewhere:  bring a package from $UPSTREAM/releases to this machine"
}

# ---- main ------------------------------------------------------------------------------------------------------

ask_administrator() {
  name_host_problems >&2
  fail "$exec_error" 'an apptainer or singularity that runs a container' \
    'many clusters have it as a module:        module avail apptainer singularity' \
    "else ask the administrator to run:        sudo $0" \
    "with internet and user namespaces, also:  tools/install-unprivileged.sh of $UPSTREAM"
}

main() {
  local word='already works' check=false
  case ${1:-} in
    '') ;;
    --check) check=true ;;
    --help | -h) usage && return 0 ;;
    *) usage >&2 && return 2 ;;
  esac
  if [ -z "$root" ]; then PATH+=:/usr/sbin:/sbin; fi # usermod and modprobe; not on everyone's PATH
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  make_container "$work/container"

  if prove && [ -z "$build_error" ] && ! fuse_is_closed; then
    report "$word" && return 0
  fi
  if $check || ! is_root; then
    [ -n "$exec_mode" ] || ask_administrator
    report "$word"
    [ -z "$build_error" ] || note "$build_error"
    name_host_problems
    return 0
  fi

  exec 9>"$root/run/setup-apptainer.lock"
  flock -n 9 || { say 'waiting for another run of this script' && flock 9; }
  if ! prove_exec && ! spare_sys_resource; then # once more: that other run may have installed it
    # shellcheck disable=SC1091
    . "$root/etc/os-release"
    word='works'
    install_apptainer
  fi
  fix_host
  hash -r
  prove || { spare_sys_resource && prove; } || {
    name_host_problems >&2
    fail "$exec_error" 'a container that runs' "end what is named above; more says: $engine --debug exec …"
  }
  report "$word"
  if [ -n "$build_error" ]; then
    note "$build_error"
    name_host_problems
  fi
}

main "$@"

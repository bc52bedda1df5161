# shellcheck shell=bash disable=SC2154,SC2034 # the scripts that source this set what they want, and use what it sets
# For scripts that unpack programs from Debian's packages: of another release than this system's, beside it, and without
# installing anything. Sourced by the scripts called *-tree, which say what they want in
#
#   self name suite      what messages begin with, the tree's name in the cache, the release of Debian
#   what                 for messages
#   skip                 packages, as extended regular expressions, to leave out with all that only they need
#   tells                how a program is asked for its version, unless that is --version
#
# The packages are downloaded with apt from the mirror that this machine uses; apt's own lists and cache are not touched.
# It needs Debian or its like, not root. What it makes is in ~/.cache/pgxlock, for root in /var/cache/pgxlock (where the
# user that a server runs as can read it), unless PGXLOCK_CACHE names another directory.
#
# A tree gets its name when it is complete:
#
#   root/      the packages, as the root directory of a system
#   ...        a wrapper for each program, where the caller wants it
set -euo pipefail
umask 022

say() { echo "$self: $*" >&2; }
fail() {
  say "$*"
  exit 1
}

# First of all: other systems may also lack what a newer bash understands of the rest.
for command in apt-get apt-cache dpkg flock; do
  command -v "$command" >/dev/null || fail "there is no $command: this works on Debian and its like only"
done

# begin sets tree, and fresh if it is to be made: when it is not there yet, or $1 is set. Then work is where to make it,
# root its root, and own apt's options.
begin() {
  local cache=${PGXLOCK_CACHE-} lock
  if [[ ! $cache ]]; then
    if [[ $(id -u) == 0 ]]; then cache=/var/cache/pgxlock; else cache=${XDG_CACHE_HOME:-$HOME/.cache}/pgxlock; fi
  fi
  mkdir -p "$cache"
  cache=$(cd "$cache" && pwd)
  tree=$cache/$name
  exec {lock}>"$tree.lock"
  flock "$lock" # another run may be at it
  fresh=
  if [[ ! $1 && -d $tree ]]; then return; fi
  fresh=yes

  work=$(mktemp -d "$tree.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  chmod 755 "$work"
  root=$work/root
  mkdir -p "$work"/apt/{empty,state/lists/partial,cache/archives/partial,debs} "$root"

  # An apt of our own, in which nothing is installed. What this machine's does after an update is none of its business.
  : >"$work/apt/state/status"
  cat >"$work/apt/apt.conf" <<END
Dir::State "$work/apt/state";
Dir::State::status "$work/apt/state/status";
Dir::Cache "$work/apt/cache";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
Acquire::Retries "3";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
  own=(-c "$work/apt/apt.conf") # read last, after this machine's configuration

  site=$(mirror)
  if [[ ! $site ]]; then # apt knows once it has been there, which it may never have been in a container
    apt-get "${own[@]}" -qq update >&2 || true
    site=$(mirror "${own[@]}")
  fi
  [[ $site ]] || fail "this machine's apt knows no mirror of Debian"
  read -r site key <<<"$site"

  echo "deb ${key:+[signed-by=$key] }$site $suite main" >"$work/apt/sources.list"
  cat >>"$work/apt/apt.conf" <<END
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "$work/apt/empty";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "$work/apt/empty";
APT::Update::Error-Mode "any";
END
  apt-get "${own[@]}" -qq update >&2 || fail "Debian's $suite, which has $what, cannot be had from this machine's mirror"
}

# mirror prints the mirror and its key as apt knows them: of the main archive, not of security updates or third parties.
mirror() {
  # shellcheck disable=SC2016 # apt expands these, not the shell
  apt-get "$@" indextargets --format '$(SITE) $(SIGNED_BY)' 'Created-By: Packages' 'Component: main' 'Origin: Debian' |
    awk '$1 !~ /security/ && !n++ { print $1, ($2 ~ /^\// ? $2 : "") }'
}

# closure prints the given packages and all that they need: level by level, the first of alternatives, none of $skip.
closure() {
  local -A seen=()
  local level=("$@") next package
  while ((${#level[@]})); do
    for package in "${level[@]}"; do seen[$package]=1; done
    mapfile -t next < <(
      apt-cache "${own[@]}" depends --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "${level[@]}" |
        awk '
          /^ *\|?(Pre)?Depends: / {
            if (!alternative && $2 !~ /^</) print $2
            virtual = !alternative && $2 ~ /^</
            alternative = /^ *\|/
            next
          }
          virtual { print $1; virtual = 0 } # the first package that provides it
        ' | sort -u | grep -Evx "$skip"
    )
    level=()
    for package in "${next[@]}"; do
      [[ ${seen[$package]-} ]] || level+=("$package")
    done
  done
  printf '%s\n' "${!seen[@]}" | sort
}

# unpack downloads the packages and all that they need, and unpacks them in root.
unpack() {
  local packages
  mapfile -t packages < <(closure "$@")
  say "$what and ${#packages[@]} packages in all, from $suite"
  (cd "$work/apt/debs" && apt-get "${own[@]}" -qq download "${packages[@]}" >&2) ||
    fail "the packages of $what cannot be downloaded from this machine's mirror"
  # Debian's root directories are links into /usr; packages may still say /lib.
  local dir deb
  for dir in bin sbin lib lib64; do
    mkdir -p "$root/usr/$dir"
    ln -s "usr/$dir" "$root/$dir"
  done
  for deb in "$work"/apt/debs/*.deb; do
    dpkg -x "$deb" "$root"
  done
  rm -rf "$work/apt"
  rm -rf "$root"/usr/share/{doc,man,locale,info,lintian}
}

# wrap makes wrappers in the tree's directory $1 for the root's programs that follow. They need the C library of their
# own release, which is newer than this system's, or older: each wrapper starts its program through the loader that came
# with it. To exec keeps the process id, by which the tests send signals.
wrap() {
  local dir=$1 loader libraries program
  shift
  loader=$(cd "$root" && compgen -G 'lib64/ld-linux-*.so.*' || compgen -G 'lib/ld-linux-*.so.*') || fail "$what came without a loader"
  libraries=$(cd "$root" && compgen -G 'usr/lib/*-linux-gnu*') || fail "$what came without libraries"
  mkdir -p "$work/$dir"
  for program in "$@"; do
    printf '#!/bin/sh\nexec %q --inhibit-cache --library-path %q --argv0 %q %q "$@"\n' \
      "$tree/root/$loader" "$tree/root/$libraries" "$tree/$dir/${program##*/}" "$tree/root/$program" >"$work/$dir/${program##*/}"
    chmod 755 "$work/$dir/${program##*/}"
  done
  "$work/root/$loader" --inhibit-cache --library-path "$work/root/$libraries" "$root/$1" "${tells:---version}" >/dev/null ||
    fail "$what does not run on this system"
}

# finish gives the tree its name.
finish() {
  rm -rf "$tree"
  mv "$work" "$tree"
  say "$what is in $tree"
}

# single is all of a script that unpacks one package with one program, and prints the program's path. $1 is what it is
# called, $2 the package, $3 the program's path in it; then come the script's arguments: [--force] [SUITE].
single() {
  local called=$1 package=$2 program=$3 force=''
  shift 3
  if [[ ${1-} == --force ]]; then
    force=yes
    shift
  fi
  (($# <= 1)) || fail "usage: $self [--force] [SUITE]"
  suite=${1-trixie}
  name=$package-$suite what="$called of Debian's $suite"
  begin "$force"
  if [[ $fresh ]]; then
    unpack "$package"
    wrap bin "$program"
    finish
  fi
  echo "$tree/bin/${program##*/}"
}

#!/bin/sh
# README's two commands on fresh machines: minimal Debian systems, made by debootstrap, with a JRE and Debian's own Python.
#
#   scripts/fresh_machines.sh [SUITE]...      bookworm (Python 3.11.2), trixie (3.13) and sid (3.14) by default
#
# Runs `make demo`, and `make test` with FRESH_TESTS, on each machine, as root and as a user id without an entry in /etc/passwd. The
# checkout has the files that git lists here. Machines are made once, in FRESH_ROOTS; checkouts are made for each run. FRESH_COMMANDS
# chooses among `demo` and `test`, FRESH_USERS chooses user ids. Needs root, Linux, debootstrap and util-linux. The mirror is
# FRESH_MIRROR, or apt's on this machine; pip has this machine's configuration and certificates. Exit status 1 if a command failed.
set -eu
cd "$(dirname "$0")/.."

roots=${FRESH_ROOTS:-/var/tmp/pgsieve-fresh}
commands=${FRESH_COMMANDS:-demo test}
users=${FRESH_USERS:-0 54321}
tests=${FRESH_TESTS:-tests/decoding/test_lsn.py tests/pipelines/command_line/test_cli.py tests/replication/test_truncate.py}
certificates=/etc/ssl/certs/ca-certificates.crt

for program in debootstrap unshare pivot_root setpriv git; do
    command -v "$program" >/dev/null || { echo "$program is not installed" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "a system of its own needs root: sudo $0" >&2; exit 1; }

# The mirror of Debian's main archive; debootstrap has a default if apt has none.
mirror() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep '/debian/$' | sort -u | sed -n 1p
}

# Runs a shell command inside a machine: `within ROOT USER COMMAND`. With chroot instead of pivot_root, users could not create user
# namespaces, as they can on a machine.
within() {
    root=$1 user=$2 inside=$3
    passed=$(env | grep -iE '^(PIP_|UV_)[A-Z_]*=|^(http|https|no)_proxy=|^(SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE)=' || true)
    printf '%s\n' "$passed" | sed "s/'/'\\\\''/g; s/^\([A-Za-z_]*\)=\(.*\)/export \1='\2'/" >"$root/environment.sh"
    cat >"$root/enter.sh" <<'ENTER'
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/dev"
for device in null zero full random urandom tty; do touch "$1/dev/$device"; mount --bind "/dev/$device" "$1/dev/$device"; done
mkdir -m 1777 "$1/dev/shm"
ln -s /proc/self/fd "$1/dev/fd"
mkdir -p "$1/.outside"
cd "$1"
pivot_root . .outside
cd /
umount -l /.outside
exec setpriv --reuid "$2" --regid "$2" --clear-groups env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME="$3" LANG=C.UTF-8 TERM=dumb sh -c '. /environment.sh; cd /; eval "$0"' "$4"
ENTER
    home=/root
    [ "$user" = 0 ] || home=/
    unshare --mount --pid --fork --kill-child sh -e "$root/enter.sh" "$root" "$user" "$home" "$inside"
}

make_system() {
    suite=$1 root=$2
    rm -rf "$root"
    mkdir -p "$root"
    from=${FRESH_MIRROR:-$(mirror)}
    # shellcheck disable=SC2086 # no argument if there is no mirror
    debootstrap --variant=minbase --include=make,ca-certificates,python3,python3-venv "$suite" "$root" $from
    # The machine gets this machine's certificates and host names. A mirror's index may have expired.
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    [ ! -d /usr/local/share/ca-certificates ] || cp -R /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/99-dates"
    apt-config dump Acquire | grep -i '::proxy' >>"$root/etc/apt/apt.conf.d/99-dates" || true
    within "$root" 0 'update-ca-certificates >/dev/null; export DEBIAN_FRONTEND=noninteractive; apt-get update -qq
        jre=$(apt-cache --names-only search "^openjdk-(17|21)-jre-headless$" | sort | sed -n "1s/ .*//p")
        apt-get install -y -qq --no-install-recommends "$jre" >/dev/null'
    cp "$certificates" "$root$certificates"
    # pip's configuration, and the folders that it names.
    [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
    for folder in ${PIP_FIND_LINKS:-}; do
        [ ! -d "$folder" ] || { mkdir -p "$root$folder" && cp -R "$folder/." "$root$folder/"; }
    done
    touch "$root/.made"
}

status=0
try() {
    suite=$1 root=$2 user=$3 command=$4 checkout=/checkout-$3
    log=$roots/$suite-$user-$command.log
    began=$(date +%s)
    # The demo runs with few rows, and without Spark.
    arguments="ARGS='--rows 20000 --without-spark'"
    [ "$command" = demo ] || arguments="ARGS='$tests'"
    if within "$root" "$user" "cd $checkout && make $command $arguments" >"$log" 2>&1; then
        echo "$suite, user id $user: make $command succeeded after $(($(date +%s) - began)) s"
    else
        echo "$suite, user id $user: make $command FAILED after $(($(date +%s) - began)) s; the end of $log:"
        tail -n 15 "$log" | sed 's/^/    /'
        status=1
    fi
}

[ $# -gt 0 ] || set -- bookworm trixie sid
for suite in "$@"; do
    root=$roots/$suite
    [ -e "$root/.made" ] || { echo "making $suite ..."; make_system "$suite" "$root" >"$roots.$suite.log" 2>&1; } || {
        tail -n 15 "$roots.$suite.log" >&2
        exit 1
    }
    within "$root" 0 'echo "$(. /etc/os-release; echo "$PRETTY_NAME"), $(python3 --version), $(java -version 2>&1 | sed -n 1p)"'
    for user in $users; do
        rm -rf "$root/checkout-$user"
        mkdir "$root/checkout-$user"
        git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --create --ignore-failed-read |
            tar --extract --directory "$root/checkout-$user"
        chown -R "$user:$user" "$root/checkout-$user"
        for command in $commands; do
            try "$suite" "$root" "$user" "$command"
        done
    done
done
exit $status

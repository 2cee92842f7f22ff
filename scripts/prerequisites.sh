#!/bin/sh
# Checks that the machine has a suitable Python and Java.
#
#   scripts/prerequisites.sh [python|java]...
#
# Out: for `python` the path of a suitable Python, on standard output; exit status 0. If one is missing, the commands
# that install it are on standard error, and the exit status is 1.
# PYTHON names an interpreter to use; JAVA_HOME names a Java, as for Spark itself.

oldest=11 newest=14 # pyproject.toml: requires-python

say() { printf '%s\n' "$@" >&2; }

# Succeeds if $1 is a Python of a supported version; sets $found to its version.
fits() {
    found=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    case $found in
    3.*) [ "${found#3.}" -ge $oldest ] && [ "${found#3.}" -le $newest ] ;;
    *) return 1 ;;
    esac
}

check_python() {
    seen="" chosen=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if fits "$candidate"; then
            chosen=$candidate
            break
        fi
        [ -n "$found" ] && seen="$seen $candidate ($found)"
    done
    if [ -z "$chosen" ]; then
        say "pgsieve needs Python 3.$oldest to 3.$newest${PYTHON:+; PYTHON=$PYTHON is not one}." \
            "Found:${seen:- none}. To install one:" \
            "  Debian, Ubuntu  apt-get install python3 python3-venv   (Debian 12+, Ubuntu 24.04+)" \
            "  macOS           brew install python@3.$newest" \
            "  elsewhere       pyenv, or your distribution's package of Python 3.$newest" \
            "A Python that is not on the PATH: make PYTHON=/path/to/python"
        return 1
    fi
    if ! "$chosen" -c 'import ensurepip, venv' 2>/dev/null; then
        say "$chosen ($found) cannot make a virtual environment: its venv module is not installed." \
            "  Debian, Ubuntu  apt-get install python3-venv   (or python$found-venv)" \
            "  elsewhere       a Python with venv and ensurepip: make PYTHON=/path/to/python"
        return 1
    fi
    "$chosen" -c 'import sys; print(sys.executable)'
}

check_java() {
    # As in Spark, JAVA_HOME takes precedence over the PATH.
    program=${JAVA_HOME:+$JAVA_HOME/bin/}java
    # 17.0.15 is Java 17; 1.8.0_402 is Java 8. Without a JDK, macOS's own `java` prints no version.
    major=$("$program" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | sed -n 1p)
    if [ -z "$major" ]; then
        say "Spark needs Java 17 or 21, and $program is not there or does not run."
    elif [ "$major" -lt 17 ]; then
        say "Spark needs Java 17 or 21, and $program is Java $major."
    else
        case $major in
        17 | 21) ;;
        *) say "Note: $program is Java $major; 17 or 21 is what Spark asks for." ;;
        esac
        return 0
    fi
    say "To install one:" \
        "  Debian, Ubuntu  apt-get install openjdk-17-jre-headless   (or openjdk-21-jre-headless)" \
        "  macOS           brew install openjdk@17, then JAVA_HOME=\$(brew --prefix openjdk@17)" \
        "  elsewhere       a JRE or JDK 17 or 21 of any vendor" \
        "A Java that is not on the PATH: export JAVA_HOME=/path/to/jdk"
    return 1
}

status=0
[ $# -gt 0 ] || set -- python java
for wanted in "$@"; do
    case $wanted in
    python | java) "check_$wanted" || status=1 ;;
    *)
        say "usage: $0 [python|java]..."
        exit 2
        ;;
    esac
done
exit $status

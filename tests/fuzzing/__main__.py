"""Fuzz one target, guided by coverage: `python -m tests.fuzzing TARGET CORPUS [-max_total_time=SECONDS ...]`.

CORPUS is a folder, made where it is missing: of inputs to begin with, to which the recorded streams and whatever
reaches more code are added. The options are libFuzzer's. Ends with an error at the first finding, and with
its input in a file (`-artifact_prefix=` says where). atheris comes as a wheel for Linux on x86-64 only.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pgsieve.decoding"]):
    from tests.fuzzing.targets import TARGETS, seeds

LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=8192")
"""An input that takes more seconds or memory is a finding, too.

atheris 3.0 never frees the results of comparisons that it watches: with those of numpy's arrays, `headers` and
`columns` grow by about a kilobyte an input, and reach the limit after more than a million.
"""


def main(name: str, corpus: Path, options: list[str]) -> None:
    """Add the seeds to the corpus and start libFuzzer, which ends this process."""
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds(name):
        (corpus / hashlib.sha256(seed).hexdigest()).write_bytes(seed)
    atheris.Setup(["fuzzing", *LIMITS, *options, str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzzing {'|'.join(TARGETS)} CORPUS [-max_total_time=SECONDS ...]")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

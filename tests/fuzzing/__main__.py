"""Fuzz one target, guided by coverage: `python -m tests.fuzzing TARGET CORPUS [-max_total_time=SECONDS ...]`.

CORPUS is a folder of first inputs, created if it is missing. The recorded streams are added to it, and later every input that reaches
more code. The options are libFuzzer's. The program ends with an error at the first finding, and writes its input to a file
(`-artifact_prefix=` sets the folder). atheris has a wheel only for Linux on x86-64.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pgsieve.decoding"]):
    from tests.fuzzing.targets import TARGETS, seeds

LIMITS = ("-timeout=5", "-rss_limit_mb=2048", "-max_len=8192")
"""An input that needs more seconds or memory than this is also a finding.

atheris 3.0 never frees the results of the comparisons that it watches. Because of numpy's arrays, `headers` and `columns` grow by about
a kilobyte per input, and reach the limit after more than a million inputs.
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

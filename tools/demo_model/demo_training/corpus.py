"""Rebuild the training text from Debian's documentation packages.

Downloads the packages by name and version, extracts prose paragraphs from their HTML, cleans them,
removes duplicates, and splits the documents into training and held-out ones. The tokenizer is in
tokenizer.py; generated tasks are in batches.py and chat.py.

    python -m demo_training.corpus --debs work/debs --out work
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 2


@dataclass(frozen=True)
class Package:
    """One Debian 12 package whose documentation may be trained on."""

    name: str
    version: str
    licence: str


PACKAGES = (
    Package("ant-doc", "1.10.13-1", "Apache-2.0"),
    Package("apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0"),
    Package("cinder-doc", "2:21.3.1-1~deb12u1", "Apache-2.0"),
    Package("clang-15-doc", "1:15.0.6-4", "Apache-2.0 WITH LLVM-exception"),
    Package("cmake-doc", "3.25.1-1", "BSD-3-Clause"),
    Package("cython-doc", "0.29.32-2", "Apache-2.0"),
    Package("docutils-doc", "0.19+dfsg-6", "public domain"),
    Package("dpdk-doc", "22.11.11-0+deb12u1", "BSD-3-Clause"),
    Package("erlang-doc", "1:25.2.3+dfsg-1+deb12u4", "Apache-2.0"),
    Package("ghc-doc", "9.0.2-4", "BSD-3-Clause"),
    Package("glance-doc", "2:25.1.0-2+deb12u5", "Apache-2.0"),
    Package("golang-1.19-doc", "1.19.8-2", "BSD-3-Clause"),
    Package("groovy-doc", "2.4.21-8", "Apache-2.0"),
    Package("heat-doc", "1:19.0.0-3", "Apache-2.0"),
    Package("ironic-doc", "1:21.4.4-0+deb12u2", "Apache-2.0"),
    Package("keystone-doc", "2:22.0.2-0+deb12u6", "Apache-2.0"),
    Package("libboost1.81-doc", "1.81.0-5+deb12u1", "BSL-1.0"),
    Package("libxml2-doc", "2.9.14+dfsg-1.3~deb12u6", "MIT"),
    Package("llvm-15-doc", "1:15.0.6-4", "Apache-2.0 WITH LLVM-exception"),
    Package("manila-doc", "1:15.1.0-2", "Apache-2.0"),
    Package("neutron-doc", "2:21.0.0-7+deb12u1", "Apache-2.0"),
    Package("nodejs-doc", "18.20.4+dfsg-1~deb12u3", "MIT"),
    Package("nova-doc", "2:26.2.2-1~deb12u5", "Apache-2.0"),
    Package("ntpsec-doc", "1.2.2+dfsg1-1+deb12u1", "NTP"),
    Package("numba-doc", "0.56.4+dfsg-2", "BSD-2-Clause"),
    Package("octavia-doc", "11.0.0-2+deb12u1", "Apache-2.0"),
    Package("opencv-doc", "4.6.0+dfsg-12", "Apache-2.0"),
    Package("openvswitch-doc", "3.1.0-2+deb12u1", "Apache-2.0"),
    Package("postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL"),
    Package("pypy3-doc", "7.3.11+dfsg-2+deb12u3", "MIT"),
    Package("python-aiohttp-doc", "3.8.4-1+deb12u2", "Apache-2.0"),
    Package("python-astropy-doc", "5.2.1-2+deb12u1", "BSD-3-Clause"),
    Package("python-attr-doc", "22.2.0-1", "MIT"),
    Package("python-click-doc", "8.1.3-2", "BSD-3-Clause"),
    Package("python-coverage-doc", "6.5.0+dfsg1-2", "Apache-2.0"),
    Package("python-cryptography-doc", "38.0.4-3+deb12u1", "Apache-2.0 OR BSD-3-Clause"),
    Package("python-dask-doc", "2022.12.1+dfsg-2", "BSD-3-Clause"),
    Package("python-distributed-doc", "2022.12.1+ds.1-3", "BSD-3-Clause"),
    Package("python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause"),
    Package("python-djangorestframework-doc", "3.14.0-2+deb12u1", "BSD-2-Clause"),
    Package("python-flask-doc", "2.2.2-3", "BSD-3-Clause"),
    Package("python-gevent-doc", "22.10.2-3", "MIT"),
    Package("python-h5py-doc", "3.7.0-8", "BSD-3-Clause"),
    Package("python-ipython-doc", "8.5.0-4", "BSD-3-Clause"),
    Package("python-jinja2-doc", "3.1.2-1+deb12u3", "BSD-3-Clause"),
    Package("python-lmfit-doc", "1.1.0-1", "MIT"),
    Package("python-markdown-doc", "3.4.1-2+deb12u1", "BSD-3-Clause"),
    Package("python-mpmath-doc", "1.2.1-2", "BSD-3-Clause"),
    Package("python-nibabel-doc", "5.0.0-2", "MIT"),
    Package("python-openstackclient-doc", "6.0.0-4", "Apache-2.0"),
    Package("python-openstacksdk-doc", "0.101.0-2", "Apache-2.0"),
    Package("python-pandas-doc", "1.5.3+dfsg-2", "BSD-3-Clause"),
    Package("python-peewee-doc", "3.14.10+dfsg-1", "MIT"),
    Package("python-pydicom-doc", "2.3.1-1", "MIT"),
    Package("python-pymatgen-doc", "2022.11.7+dfsg1-11+deb12u2", "MIT"),
    Package("python-pymongo-doc", "3.11.0-1+deb12u1", "Apache-2.0"),
    Package("python-pytest-doc", "7.2.1-2", "MIT"),
    Package("python-requests-doc", "2.28.1+dfsg-1", "Apache-2.0"),
    Package("python-sasmodels-doc", "1.0.6-2", "BSD-3-Clause"),
    Package("python-scipy-doc", "1.10.1-2", "BSD-3-Clause"),
    Package("python-scrapy-doc", "2.8.0-2", "BSD-3-Clause"),
    Package("python-setuptools-doc", "66.1.1-1+deb12u2", "MIT"),
    Package("python-skbio-doc", "0.5.8-4", "BSD-3-Clause"),
    Package("python-skimage-doc", "0.19.3-8", "BSD-3-Clause"),
    Package("python-sklearn-doc", "1.2.1+dfsg-1", "BSD-3-Clause"),
    Package("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT"),
    Package("python-statsmodels-doc", "0.13.5+dfsg-7", "BSD-3-Clause"),
    Package("python-sympy-doc", "1.11.1-1", "BSD-3-Clause"),
    Package("python-tables-doc", "3.7.0-5", "BSD-3-Clause"),
    Package("python-taskflow-doc", "5.0.0-3", "Apache-2.0"),
    Package("python-tornado-doc", "6.2.0-3+deb12u4", "Apache-2.0"),
    Package("python-werkzeug-doc", "2.2.2-3+deb12u1", "BSD-3-Clause"),
    Package("python-whoosh-doc", "2.7.4+git6-g9134ad92-7", "BSD-2-Clause"),
    Package("python-xarray-doc", "2023.01.0-1.1", "Apache-2.0"),
    Package("python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0"),
    Package("rust-doc", "1.63.0+dfsg1-2", "MIT OR Apache-2.0"),
    Package("sahara-doc", "1:16.0.0-2", "Apache-2.0"),
    Package("scala-doc", "2.11.12-5", "BSD-3-Clause"),
    Package("scons-doc", "4.4.0+dfsg-1", "MIT"),
    Package("senlin-doc", "14.0.0-1", "Apache-2.0"),
    Package("sphinx-doc", "5.3.0-4", "BSD-2-Clause"),
    Package("sqlite3-doc", "3.40.1-2+deb12u2", "public domain"),
    Package("swift-doc", "2.30.1-0+deb12u3", "Apache-2.0"),
    Package("tomcat10-docs", "10.1.60-1~deb12u1", "Apache-2.0"),
    Package("twisted-doc", "22.4.0-4+deb12u1", "MIT"),
    Package("varnish-doc", "7.1.1-2+deb12u1", "BSD-2-Clause"),
    Package("vtk9-doc", "9.1.0+really9.1.0+dfsg2-5+deb12u1", "BSD-3-Clause"),
    Package("watcher-doc", "9.0.0-2+deb12u1", "Apache-2.0"),
    Package("xorg-docs", "1:1.7.1-1.2", "MIT"),
)

# The shipped filler text comes only from these packages, so that its licence notice stays short.
FILLER_PACKAGES = ("cmake-doc", "postgresql-doc-15", "python3.11-doc", "rust-doc", "sqlite3-doc")

PARAGRAPH = re.compile(
    r"<(?:p|li|dd)\b[^>]*>(.*?)"
    r"(?=</?(?:p|li|dd)\b|<pre\b|<div\b|<h\d|<[uod]l\b|<table\b|</?dt|</td|<blockq)",
    re.DOTALL | re.IGNORECASE,
)
TAG = re.compile(r"<[^>]*>")
SPACE = re.compile(r"\s+")
ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
    | {"\u2026": "...", "\u00a0": " ", "\u00b6": "", "\u2192": "->", "\u2212": "-", "\u2010": "-"}
)


def download(directory: Path) -> None:
    """Fetch the packages that are not yet in ``directory`` with apt-get."""
    directory.mkdir(parents=True, exist_ok=True)
    missing = [one for one in PACKAGES if not list(directory.glob(f"{one.name}_*.deb"))]
    if missing:
        pinned = [f"{package.name}={package.version}" for package in missing]
        subprocess.run(["apt-get", "download", "-q", *pinned], cwd=directory, check=True)


def html_files(deb: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each HTML file in a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and member.name.endswith((".html", ".htm")):
                data = archive.extractfile(member)
                if data is not None and member.size < 8_000_000:
                    yield member.name, data.read().decode("utf-8", errors="replace")


def is_prose(text: str) -> bool:
    """Return whether a text is a paragraph of sentences, not a table row or a list of names."""
    words = text.split(" ")
    if len(words) < 9 or len(words) > 400 or not text[0].isupper() or text[-1] not in ".!?:":
        return False
    if not text.isascii():
        return False
    letters = sum(char.isalpha() or char == " " for char in text)
    plain = sum(word.strip(".,;:!?()'\"").isalpha() for word in words)
    return letters >= 0.88 * len(text) and plain >= 0.76 * len(words)


def paragraphs(page: str) -> Iterator[str]:
    """Yield the clean prose paragraphs of one HTML page, in order."""
    for match in PARAGRAPH.finditer(page):
        text = html.unescape(TAG.sub("", match.group(1))).translate(ASCII)
        text = SPACE.sub(" ", text).strip()
        if text and is_prose(text):
            yield text


def digest(text: str) -> int:
    """Return a stable 64-bit hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def documents(deb: Path, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each page with prose, without the paragraphs in ``seen``."""
    for path, page in html_files(deb):
        kept = []
        for text in paragraphs(page):
            key = digest(text.lower())
            if key not in seen:
                seen.add(key)
                kept.append(text)
        if sum(map(len, kept)) >= 200:
            yield path, "\n\n".join(kept)


def main() -> None:
    """Write train.jsonl and held_out.jsonl; print the size of each package's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--debs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    download(args.debs)
    seen: set[int] = set()
    total = 0
    with (
        (args.out / "train.jsonl").open("w") as train,
        (args.out / "held_out.jsonl").open("w") as held_out,
    ):
        for package in PACKAGES:
            deb = next(iter(args.debs.glob(f"{package.name}_*.deb")))
            size = 0
            for path, text in documents(deb, seen):
                target = held_out if digest(path) % 100 < HELD_OUT_PERCENT else train
                target.write(json.dumps({"package": package.name, "text": text}) + "\n")
                size += len(text)
            total += size
            print(f"{package.name:28} {size / 1e6:7.2f} MB  {package.licence}", flush=True)
    print(f"{'total':28} {total / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()

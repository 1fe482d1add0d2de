"""English text for perplexity and long prompts: what every CPython ships, and six novels for long runs.

    from benchmarks import corpus
    corpus.text("topics")      # Python's language reference, about half a million characters, always there
    corpus.text("austen")      # six novels, 4 million characters; corpus.text("emma") and so on for one

The novels are in the public domain. They come from Debian's package r-cran-janeaustenr, fetched with apt (which checks
its signature), unpacked with dpkg-deb, never installed. On the command line: `python -m benchmarks.corpus`.
"""

import argparse
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cache

PACKAGE = "r-cran-janeaustenr"
NOVELS = {
    "emma": "EMMA",
    "mansfield-park": "MANSFIELD PARK",
    "northanger-abbey": "NORTHANGER ABBEY",
    "persuasion": "PERSUASION",
    "pride-and-prejudice": "PRIDE AND PREJUDICE",
    "sense-and-sensibility": "SENSE AND SENSIBILITY",
}
NAMES = ("topics", "austen", *NOVELS)
RECIPE = {"package": PACKAGE, "extraction": 1}


def text(name: str = "topics") -> str:
    """The text of that name, fetched once if it is one of the novels. Raises SystemExit with the cause if it can't."""
    if name == "topics":
        from pydoc_data.topics import topics

        return "\n".join(topics[key] for key in sorted(topics))
    if name == "austen":
        return "\n\n".join(text(novel) for novel in NOVELS)
    if name in NOVELS:
        return (cache.prepared("austen", RECIPE, _fetch_novels) / f"{name}.txt").read_text()
    raise SystemExit(f"text '{name}' is not one of {', '.join(NAMES)}")


def _fetch_novels(folder: Path) -> None:
    missing = [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]
    if missing:
        raise SystemExit(
            f"the novels come from Debian's package {PACKAGE}, and {' and '.join(missing)} is not on this machine; use "
            f"the text 'topics', or copy {cache.cache_dir() / 'austen'} from a Debian machine"
        )
    work = folder / "unpacked"
    work.mkdir()
    _apt_download(work)
    (archive,) = work.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(work)], check=True)
    (database,) = work.rglob("data/Rdata.rdb")
    by_title = {lines[0].upper(): lines for lines in read_rdb(database.read_bytes())}
    for name, title in NOVELS.items():
        (folder / f"{name}.txt").write_text("\n".join(by_title[title]))
    shutil.rmtree(work)


def _apt_download(folder: Path) -> None:
    """apt-get download; on failure once more after apt-get update, for machines whose package lists are empty."""
    cache.say(f"austen: downloading {PACKAGE} (1.6 MB) with apt-get")
    download = ["apt-get", "download", "-q", PACKAGE]
    for command in (download, ["apt-get", "update", "-q"], download):
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if list(folder.glob("*.deb")):
            return
    raise SystemExit(f"apt-get could not download {PACKAGE}:\n{result.stderr.strip()}\nUse the text 'topics' instead.")


def read_rdb(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database.

    Such a file is a row of entries, each a 4-byte length and a zlib stream of an object in R's XDR format: a header of
    14 bytes and the encoding's name, then type 16 (character vector), the count, and for each string a word of flags,
    its length and its bytes, all big-endian.
    """
    rest = database
    while rest:
        stream = zlib.decompressobj()
        body = stream.decompress(rest[4:])
        rest = stream.unused_data

        def word(at: int, body: bytes = body) -> int:
            return int.from_bytes(body[at : at + 4], "big")

        at = 18 + word(14) if word(2) == 3 else 14
        if body[:2] != b"X\n" or word(at) & 0xFF != 16:
            raise ValueError("not a character vector in R's XDR format")
        count, at = word(at + 4), at + 8
        lines = []
        for _ in range(count):
            length = word(at + 4)
            lines.append(body[at + 8 : at + 8 + length].decode())
            at += 8 + length
        yield lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description="Fetch a text and print its size.")
    parser.add_argument("name", nargs="?", default="austen", choices=NAMES, help="default: austen")
    name = parser.parse_args().name
    content = text(name)
    print(f"{name}: {len(content):,} characters, {len(content.split()):,} words")


if __name__ == "__main__":
    main()

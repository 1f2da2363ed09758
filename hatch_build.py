"""Make the README's links absolute when a distribution is built: a package index shows it without the repository."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def absolute(text: str, repository: str) -> str:
    """Rewrite relative links.

    Args:
        text: markdown.
        repository: the repository's address, without a slash at its end. "": links become their text, images go.
    """

    def rewritten(link: re.Match[str]) -> str:
        target = link["target"]
        if "://" in target or target.startswith("#"):
            return link[0]
        if not repository:
            return "" if link["image"] else link["text"]
        return f"{link['image']}[{link['text']}]({repository}/{'raw' if link['image'] else 'blob'}/HEAD/{target})"

    return _LINK.sub(rewritten, text)


class CustomMetadataHook(MetadataHookInterface):
    """Gives the distribution a README with absolute links."""

    def update(self, metadata: dict[str, object]) -> None:
        """Add ``readme``, with links to the ``Source`` of ``[project.urls]``."""
        urls = metadata.get("urls")
        repository = str(urls.get("Source", "")) if isinstance(urls, dict) else ""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository.rstrip("/"))}

"""What a page of a report says and loads, read with the standard library's parser."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_LOADING = ("src", "href", "srcset", "data", "poster", "action", "background", "xlink:href")
_VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class ParsedPage(HTMLParser):
    """Feed it a page; `open` holds what was not closed at the end."""

    links: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    policy: str = ""
    rows: list[list[str]] = field(default_factory=list)
    """Cells of each row of each table."""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if found.get("id"):
            self.ids.append(found["id"] or "")
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found.get("content") or ""
        self.links += [found[name] or "" for name in _LOADING if name in found]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> ends {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """Everything that is read, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    def row(self, first: str) -> list[str]:
        """The cells after the row's first one, which is `first` or else begins with it."""
        found = [[" ".join(cell.split()) for cell in cells] for cells in self.rows if cells]
        for fits in (str.__eq__, str.startswith):
            for cells in found:
                if fits(cells[0], first):
                    return cells[1:]
        raise AssertionError(f"no row {first!r}")


def parsed(page: str) -> ParsedPage:
    """The page, of which every tag is closed, no id is there twice, nothing is loaded and links
    lead to ids within."""
    result = ParsedPage()
    result.feed(page)
    result.close()
    assert not result.open, result.open
    twice = {each for each in result.ids if result.ids.count(each) > 1}
    assert not twice
    assert set(_outside(result)) == set()
    assert "script" not in result.tags
    assert result.policy.startswith("default-src 'none'")
    assert "url(http" not in page and "@import" not in page
    return result


def _outside(page: ParsedPage) -> Iterator[str]:
    for link in page.links:
        if link != "data:," and not (link.startswith("#") and link[1:] in page.ids):
            yield link

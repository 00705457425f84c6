"""Pages as the site wants them: links to files next to docs/, such as ../examples/optax_example.py.

In the repository they are what they say. For the site each such file becomes a part of it: Python files and
Markdown become pages, anything else is copied; of a folder its report.html and its numbers, or its
README.md. A link to what does not exist is left as it is, and fails a strict build.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that some page links to."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for path in OUTSIDE.findall(page.content_string):
            for source in _behind(root / path):
                if files.get_file_from_path(_name_on_site(source, root)) is None:
                    files.append(_taken_in(source, root, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links point to what was added. A value and its error stay on one line, also in a narrow table."""
    root = Path(config.config_file_path).parent

    def on_site(match: re.Match[str]) -> str:
        sources = _behind(root / match[1])
        return f"]({_name_on_site(sources[0], root)}" if sources else match[0]

    return OUTSIDE.sub(on_site, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _behind(path: Path) -> list[Path]:
    """The files that a link stands for, the one to open first."""
    if (path / "report.html").is_file():
        return [path / "report.html", *sorted(path.glob("*.csv"))]
    return [file for file in (path, path / "README.md") if file.is_file()]


def _name_on_site(source: Path, root: Path) -> str:
    name = source.relative_to(root)
    return (name.with_suffix(".md") if name.suffix == ".py" else name).as_posix()


def _taken_in(source: Path, root: Path, config: MkDocsConfig) -> File:
    name = _name_on_site(source, root)
    if source.suffix != ".py":
        return File.generated(config, name, abs_src_path=str(source))
    title = source.relative_to(root).as_posix()
    return File.generated(config, name, content=f"# {title}\n\n```python\n{source.read_text()}```\n")

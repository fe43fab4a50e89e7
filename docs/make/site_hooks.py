"""Hooks of mkdocs: a site of the pages of the whole repository, and `llms.txt`."""

import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone, without a package
import site_pages as pages


def on_config(config: Any) -> Any:
    """Expands folders of the navigation; anchors are made as on GitHub."""
    config.nav = pages.expanded(config.nav)
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def _paths(config: Any) -> list[str]:
    """All pages of the site: those of the navigation, and those of `docs/` that it lacks."""
    listed = [path for _, path in pages.listed(config.nav)]
    return [*listed, *pages.unlisted(config.nav)]


def on_files(files: Files, config: Any) -> Files:
    """Replaces the files of `docs/` by those of the repository, under their paths in it."""
    own = {file.src_uri for file in files if file.abs_src_path.startswith(config.docs_dir)}
    kept = Files([file for file in files if file.src_uri not in own])
    existing = [path for path in _paths(config) if (pages.ROOT / path).is_file()]
    for path in [*existing, *pages.assets(existing)]:
        kept.append(File.generated(config, path, abs_src_path=str(pages.ROOT / path)))
    return kept


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Keeps links within the site, and the text of the others."""
    known = {file.src_uri for file in files}
    return pages.without_links_outside(page.file.src_uri, markdown, known)


def on_post_build(config: Any) -> None:
    """Writes `llms.txt` and, next to each page, its source, which the index links."""
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(pages.llms_text(config.site_name, config.nav), encoding="utf-8")
    for path in _paths(config):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pages.ROOT / path, site / path)

"""The table of docs/multimodal.md: families that see or hear x everything of `media_checks`.

    python tests/model/media_table.py                                  all that is not measured yet
    python tests/model/media_table.py --only Qwen2VL Gemma3            these again
    python tests/model/media_table.py --columns fsdp2 lora --again     these columns of all
    python tests/model/media_table.py --failed                         what was not equal

Results are kept in docs/results/multimodal.json, which the page is made of.
"""

import os
import sys

import families_page
import families_table
import media_checks
from families_table import ROOT, Table

PAGE = ROOT / "docs" / "multimodal.md"
MARK = "<!-- below: tests/model/media_table.py -->"
TITLES = {
    "packed": "packs",
    "cuts": "gradient",
    "sampler": "engine",
    "fsdp2": "FSDP2",
    "sequence": "sp",
    "lora": "LoRA",
}


def page(results):
    """The page as it stands down to the mark, and the table of multimodal.json below it."""
    text, mark, _ = PAGE.read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name}: expected a line {MARK}, under which the table goes")
    return "\n".join([text + MARK, "", *families_page.table(results, TITLES)])


TABLE = Table(
    families=list(media_checks.KINDS),
    checks=media_checks,
    results=ROOT / "docs" / "results" / "multimodal.json",
    page=PAGE,
    write=page,
)

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    families_table.about()  # what is imported here is not imported by every cell
    sys.exit(families_table.main(TABLE, __doc__))

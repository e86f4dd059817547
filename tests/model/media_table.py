"""The table of docs/multimodal.md: families that see or hear x everything of `media_checks`.

    python tests/model/media_table.py                                  all that is not measured yet
    python tests/model/media_table.py --only Qwen2VL Gemma3            these again
    python tests/model/media_table.py --columns fsdp2 lora --again     these columns of all
    python tests/model/media_table.py --failed                         what was not equal

Results are kept in docs/results/multimodal.json, which the page is made of.
"""

import os
import sys

import families_table
import media_checks
import media_page
from families_table import ROOT, Table

TABLE = Table(
    families=list(media_checks.KINDS),
    checks=media_checks,
    results=ROOT / "docs" / "results" / "multimodal.json",
    page=media_page.PAGE,
    write=media_page.page,
)

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    families_table.about()  # what is imported here is not imported by every cell
    sys.exit(families_table.main(TABLE, __doc__))

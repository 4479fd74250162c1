"""Words that are not used here, with what to write instead; ``make lint`` runs it over all code and pages.

The reader is an ML engineer who knows torch, ruff and pytest, and whose first language may not be English. The list is
short: what came back in review more than once. Add a phrase together with its replacement.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# phrase (regular expression, whole words, any case): write instead
WORDS = {
    # sounds translated
    r"at hand": "available, current, or nothing",
    r"(?:is|are|was) spoken of": "mentioned",
    r"speaks? (?:for|against) (?:it|this|that|them)": "evidence for, evidence against",
    r"what became of": "what happened to, the result of",
    r"unless told(?: otherwise)?": "by default",
    r"anew": "again, a new",
    r"tells? of": "describes, reports",
    r"(?:is|are|was) told of": "reported, named",
    r"too dear": "too expensive",
    r"get(?:s|ting)? dearer": "gets more expensive",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"cannot bear": "cannot handle",
    r"on arrival": "already contained NaN, already non-finite",
    r"stands? against": "blocks, speaks against",
    r"nothing that would": "no problems found",
    r"has an ending that": "unsupported format",
    r"in no format that is known|not known here|known here": "unrecognized format",
    r"was named": "was given",
    r"a word about (?:it|that|them)": "a warning",
    r"hands on": "forwards",
    r"those at work": "open, active",
    r"the books of": "the state of",
    r"plays? again": "replays",
    r"(?:as|so) many (?:of them )?as (?:there are|needed|are needed)": "one for each",
    r"none of (?:the loop's|ours|its own)": "not the loop's, not ours",
    r"hurt": "recovered",
    r"goes? on where": "resumes where, continues from",
    # metaphors for things that have names
    r"sick": "non-finite, bad",
    r"escort|keeper|crew|seam|ears?": "the name of the thing",
    r"wreck": "run",
    # one spelling: American
    r"(?:in|mis)?behaviours?": "behavior",
    r"colou?rs?(?<!color)(?<!colors)|coloured": "color, colored",
    r"(?:un|re|de)?(?:initial|normal|quant|recogn|serial|optim|vector|minim|maxim)is(?:e[ds]?|ing|ations?)": "-iz-",
    r"cent(?:re|red)": "center, centered",
    r"labell(?:ed|ing)": "labeled, labeling",
    r"modell(?:ed|ing)": "modeled, modeling",
    r"neighbours?": "neighbor",
    r"roll-outs?": "rollout",
}


def _needles(phrase: str) -> list[str]:
    """Pieces of text, one of which is in every file that has the phrase: looking for those is cheap."""
    certain = re.sub(r"\(\?[^()]*\)\??|\w\?", "\n", phrase)
    longest = max(re.findall(r"[a-z]{3,}", certain), key=len, default="")
    return [longest] if longest and "|" not in certain else re.findall(r"[a-z]{3,}", phrase)


PATTERNS = [
    (_needles(phrase), re.compile(rf"(?<![\w`-])(?:{phrase})(?![\w`-])", re.I), instead)
    for phrase, instead in WORDS.items()
]

# Pages that are written by a command, records of what was, quotations of what other tools print, and this list.
GENERATED = ("docs/rules/", "docs/causes/", "docs/cli.md", "docs/architecture-walk.md", "docs/schemas/", "CHANGELOG.md")
QUOTED = (
    "scripts/words.py",
    "tests/test_docs.py",
    "src/nanproof/diagnosing/wording.toml",
    "src/nanproof/logs/messages.py",
)


def found_in(text: str) -> list[tuple[int, str, str]]:
    """Line, phrase and replacement of every word in a text that is not used here.

    >>> found_in("fine\\nThe project at hand.")
    [(2, 'at hand', 'available, current, or nothing')]
    """
    lower = text.lower()
    return sorted(
        (text.count("\n", 0, match.start()) + 1, match[0], instead)
        for needles, pattern, instead in PATTERNS
        if any(needle in lower for needle in needles)
        for match in pattern.finditer(text)
    )


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    wrong = 0
    for name in listed.stdout.split():
        if name.startswith((*GENERATED, *QUOTED)) or not (ROOT / name).exists():
            continue
        for line, phrase, instead in found_in((ROOT / name).read_text()):
            wrong += 1
            print(f"{name}:{line}: {phrase!r}: write {instead}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

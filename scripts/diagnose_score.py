"""How often diagnose names the confirmed cause: ``scripts/diagnose_score.py INCIDENTS.jsonl [--misses]``.

Each line of the file is an incident with the nine fields of evidence and its cause (``confirmed_cause`` or ``cause``),
which diagnose does not get to see. Prints the share of incidents whose cause comes first, within the first three, of
benign ones that are called benign, the same by cause, and how often each word of confidence was right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict

from nanproof.diagnosing import diagnose_evidence
from nanproof.diagnosing.described import FIELDS, read_description


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("incidents", help="a JSON-lines file of incidents with their confirmed causes")
    parser.add_argument("--misses", action="store_true", help="print each incident whose cause does not come first")
    options = parser.parse_args()
    places: dict[str, list[int]] = defaultdict(list)
    sure: dict[str, list[bool]] = defaultdict(list)
    with open(options.incidents, encoding="utf-8") as file:
        for line in filter(str.strip, file):
            incident = json.loads(line)
            cause = incident.get("confirmed_cause") or incident["cause"]
            evidence, _ = read_description({k: incident[k] for k in FIELDS if k in incident})
            causes = diagnose_evidence(evidence).causes
            names = [c.name for c in causes]
            place = names.index(cause) + 1 if cause in names else 0
            places[cause].append(place)
            sure[causes[0].confidence if causes else "possible"].append(place == 1)
            if options.misses and place != 1:
                print(
                    f"{incident.get('id', '?'):<8} {cause} came {place or 'not at all'}; first: {', '.join(names[:3])}"
                )
    total = [p for found in places.values() for p in found]
    if not total:
        print("no incidents in the file")
        return 2
    print(f"{'cause':<28} {'incidents':>9} {'first':>6} {'in 3':>6}")
    for cause, found in sorted(places.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"{cause:<28} {len(found):>9} {sum(p == 1 for p in found):>6} {sum(0 < p <= 3 for p in found):>6}")
    first, three = sum(p == 1 for p in total), sum(0 < p <= 3 for p in total)
    benign = places.get("benign", [])
    print(f"{'all':<28} {len(total):>9} {first:>6} {three:>6}")
    print(
        f"top-1 {100 * first / len(total):.1f} %, top-3 {100 * three / len(total):.1f} %, "
        f"benign called benign {sum(p == 1 for p in benign)} of {len(benign)}"
    )
    for word in ("strong", "likely", "possible"):
        print(f"first cause {word}: right in {sum(sure[word])} of {len(sure[word])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The sums of the papers as loops over Python numbers: slow, obvious, and sharing no code with the package."""

from __future__ import annotations

import math
import statistics

TYPES = "ABCD"
SEGMENTS = ("V_SEARCH", "R_SEARCH", "ANSWER")


def masked_values(values, mask):
    return [value for value, selected in zip(values, mask, strict=True) if selected]


def mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def std(values, ddof):
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - ddof))


def median(values):
    return statistics.median(values) if values else 0.0


def per_segment(statistic, values, segment_ids, num_segments):
    """Statistic of every segment of one row."""
    return [
        statistic([value for value, segment in zip(values, segment_ids, strict=True) if segment == wanted])
        for wanted in range(num_segments)
    ]


def runs(mask):
    """Number of the run of ones every position belongs to."""
    numbers, current, before = [], -1, 0
    for selected in mask:
        current += 1 if selected and not before else 0
        numbers.append(current if selected else -1)
        before = selected
    return numbers


def group_members(group_ids, valid):
    members = {}
    for row, (group, is_valid) in enumerate(zip(group_ids, valid, strict=True)):
        if is_valid:
            members.setdefault(group, []).append(row)
    return members


def group_advantages(rewards, group_ids, valid, *, scale="std", singleton="zero", ddof=1, epsilon=1e-6):
    advantages = [0.0] * len(rewards)
    for rows in group_members(group_ids, valid).values():
        own = [rewards[row] for row in rows]
        if len(rows) == 1:
            if singleton == "raw":
                advantages[rows[0]] = own[0] / (1 + epsilon) if scale == "std" else own[0]
            continue
        if max(own) - min(own) < 1e-8:
            continue
        for row in rows:
            centred = rewards[row] - mean(own)
            advantages[row] = centred / (std(own, ddof) + epsilon) if scale == "std" else centred
    return advantages


def rloo_advantages(rewards, group_ids, valid, *, singleton="zero"):
    advantages = [0.0] * len(rewards)
    for rows in group_members(group_ids, valid).values():
        own = [rewards[row] for row in rows]
        if len(rows) == 1:
            advantages[rows[0]] = own[0] if singleton == "raw" else 0.0
        elif max(own) - min(own) >= 1e-8:
            for row in rows:
                advantages[row] = rewards[row] - mean([rewards[other] for other in rows if other != row])
    return advantages


def log_ratios(logps, old_logps, mask, level, turn_ids, cap=10.0):
    """Capped log-ratio of every token of one row; zero outside the mask."""
    own = [new - old if selected else 0.0 for new, old, selected in zip(logps, old_logps, mask, strict=True)]
    if level == "token":
        shared = own
    else:
        turns = turn_ids if level == "turn" else [0] * len(mask)
        shared = [
            mean([own[j] for j in range(len(mask)) if mask[j] and turns[j] == turns[i]]) for i in range(len(mask))
        ]
    return [min(cap, value) if selected else 0.0 for value, selected in zip(shared, mask, strict=True)]


def surrogate(ratio, advantage, low, high, dual_clip=None):
    """Clipped objective of one token."""
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return objective


def reduce_tokens(values, mask, how, max_tokens=None):
    rows = [masked_values(row, selected) for row, selected in zip(values, mask, strict=True)]
    trained = [row for row in rows if row]
    if how == "token_mean":
        return mean([value for row in rows for value in row])
    if how == "seq_mean_token_mean":
        return mean([mean(row) for row in trained])
    if how == "seq_mean_token_sum":
        return mean([math.fsum(row) for row in trained])
    return math.fsum(value for row in rows for value in row) / (len(rows) * max_tokens)


def token_margin(logits, token, num_competitors, margin):
    others = sorted((logit for other, logit in enumerate(logits) if other != token), reverse=True)[:num_competitors]
    if not others:
        return 50.0
    largest = max(others)
    strength = {
        "lse": largest + math.log(math.fsum(math.exp(logit - largest) for logit in others)),
        "mean": mean(others),
        "max": largest,
    }[margin]
    return max(-50.0, min(50.0, logits[token] - strength))


def topk_entropy(logits, top_m):
    kept = sorted(logits, reverse=True)[:top_m]
    if len(kept) == 1:
        return 0.0
    masses = [math.exp(logit - kept[0]) for logit in kept]
    shares = [mass / math.fsum(masses) for mass in masses]
    return -math.fsum(share * math.log(share) for share in shares if share > 0) / math.log(len(kept))


def logistic(value):
    return 1 / (1 + math.exp(-value))


def token_salience(centred, entropy, polarity, alpha=0.6, beta=0.3, gamma=0.1, tau=0.5, c_max=0.5):
    if polarity == 0:
        return 0.0
    closeness = logistic(-centred / tau) if polarity > 0 else logistic(centred / tau)
    breadth = entropy if polarity > 0 else 1 - entropy
    return min(c_max, alpha * closeness + beta * breadth + gamma * closeness * breadth)


def row_salience(margins, entropies, segment_ids, polarity, **weights):
    """Salience of every token of one row."""
    out = []
    for token, segment in enumerate(segment_ids):
        if segment < 0:
            out.append(0.0)
            continue
        centre = median([margins[j] for j, other in enumerate(segment_ids) if other == segment])
        out.append(token_salience(margins[token] - centre, entropies[token], polarity[token], **weights))
    return out


def gca_row(advantage, kind, segments, margins, entropies, eligible, gate_open, table, eta=0.2, **weights):
    """Token advantages and salience of one rollout; `table[kind][segment]` is polarity and magnitude of a cell."""
    advantages, saliences = [], []
    for token, segment in enumerate(segments):
        polarity, magnitude = table[TYPES[kind]][SEGMENTS[segment]] if kind >= 0 and segment >= 0 else (0, 0.0)
        if not (gate_open and eligible[token]) or polarity * magnitude == 0:
            advantages.append(advantage)
            saliences.append(0.0)
            continue
        pool = [margins[j] for j, other in enumerate(segments) if other == segment and eligible[j]]
        c = token_salience(margins[token] - median(pool), entropies[token], polarity, **weights)
        saliences.append(c)
        advantages.append(advantage + eta * abs(advantage) * polarity * magnitude * c)
    return advantages, saliences

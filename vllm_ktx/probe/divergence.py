"""How far two engines' next-token distributions lie apart, from what vLLM returns of them: the likeliest tokens."""

from __future__ import annotations

import numpy as np

from .engine import Scores


def kl_lower_bound(p: Scores, q: Scores) -> np.ndarray:
    """KL(p || q) `[n-1]` of the distributions coarsened to the tokens in both lists, and one class for the rest."""
    match = p.top_ids[:, :, None] == q.top_ids[:, None, :]
    shared = match.any(2)
    log_p = np.where(shared, p.top_logprobs, 0.0)
    log_q = np.where(shared, np.take_along_axis(q.top_logprobs, match.argmax(2), 1), 0.0)
    mass_p, mass_q = np.where(shared, np.exp(log_p), 0.0), np.where(shared, np.exp(log_q), 0.0)
    rest_p, rest_q = (np.maximum(1 - mass.sum(1), 1e-9) for mass in (mass_p, mass_q))
    return (mass_p * (log_p - log_q)).sum(1) + rest_p * np.log(rest_p / rest_q)

"""Which figures are better when they are higher, by their names.

Called by `parashard.callbacks.stopping`, for all callbacks that compare figures.
"""

from __future__ import annotations

import re

_RISING = (
    *("acc", "accuracy", "auc", "cosine_similarity", "sensitivity", "specificity", r"top_?(?:k|\d+)"),
    *(r"(?:precision|recall)(?:_at_(?:k|\d+))?", r"(?:sensitivity|precision|recall|specificity)_at_[a-z]+"),
    *(r"f(?:1|_?beta)(?:_score)?", r"f\d+_score", r"r2(?:_score)?", "m?iou", "io_u", "true_(?:posi|nega)tives"),
    *("pearson_correlation", "concordance_correlation"),
)
_FALLING = (
    *("mae", "mse", "rmse", "mape", "msle", "rmsle", "error", "error_rate", "cross_?entropy", "hinge", "poisson"),
    *("kl_divergence", "kullback_leibler_divergence", "log_?cosh", "nll", "perplexity", "false_(?:posi|nega)tives"),
)
"""Last words of names: of Keras' metrics, to which Keras appends a number where a name comes again, and usual ones."""


def _ends(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?:^|_)(?:{'|'.join(words)})(?:_\d+)?$")


_RISES, _FALLS = _ends(_RISING), _ends(_FALLING)


def rises(name: str) -> bool | None:
    """Tell whether a figure is better when it is higher; None: its name does not tell."""
    name = name.lower()
    if "loss" in name or _FALLS.search(name):
        return False
    return True if _RISES.search(name) else None

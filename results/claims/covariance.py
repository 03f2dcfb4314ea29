"""Equation 9 (v1: 6): BN is WN in the norm of the data's covariance.

`size` is the correlation of any two inputs, `error` the largest difference from BN over BN's
largest value. "equation-9" is compared with BN without an epsilon, "epsilon" with BN as it is
trained; "wn" has Sigma = I.
"""

import torch
import torch.nn.functional as F
from claim import Cases, Record, draw_correlated, make_tasks, run

from geoparam_lab import methods

ROWS, FEATURES, UNITS = 512, 8, 64


@torch.no_grad()
def measure(cases: Cases, *unused: object) -> list[Record]:
    records = []
    for _, _, method, correlation, _, seed in cases:
        x = draw_correlated(correlation, ROWS, FEATURES, seed)
        with methods.use_seed(seed):
            w = torch.randn(UNITS, FEATURES, dtype=torch.float64)
            gamma, beta = torch.randn(2, UNITS, dtype=torch.float64)

        eps = methods.EPSILON if method == "epsilon" else 1e-30
        norm = F.batch_norm(x @ w.T, None, None, gamma, beta, training=True, eps=eps)

        # gamma <w, x> / sqrt(w^T Sigma w) + beta
        sigma = torch.eye(FEATURES).to(x) if method == "wn" else x.T @ x / ROWS
        lengths = (w @ sigma * w).sum(dim=1).sqrt()
        equation = gamma * (x @ w.T) / lengths + beta
        records.append({"error": float((norm - equation).abs().max() / norm.abs().max())})
    return records


if __name__ == "__main__":
    tasks = make_tasks(
        "covariance", ["normal"], ["equation-9", "epsilon", "wn"], (0.0, 0.5, 0.9, 0.99)
    )
    run("covariance", tasks, measure)

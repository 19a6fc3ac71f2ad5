"""The paper's functions of two variables: Figures 1 to 3, robustness, momentum and the rule k(T). No networks."""

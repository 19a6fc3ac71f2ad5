"""The laboratory: the paper's experiments with the controls that it lacks, and a report that says which claims hold.

It uses the library as anybody would, and the library never imports it. `torchbelay reproduce` runs it.

    functions, arms, arena      what is trained, by which methods, side by side as rows of one tensor
    fig1 … ring                 the parts: each runs its experiments into records and draws its figures from them
    claims                      a verdict on every claim of the paper, by rules, from the records alone
    report                      the page
    reproduce                   what runs when, and what need not run again
"""

"""The laboratory: the paper's experiments, the controls that it lacks, and a report that says which claims hold.

The laboratory uses the library as any user does; the library never imports it. `torchbelay reproduce` runs it.

    arms, statistics, records   what all experiments share: methods, comparisons, files
    plane, ring, score          experiments: functions of two variables, eight Gaussians, images
    overhead                    what an average costs in time and memory
    claims                      a verdict on every claim of the paper, by stated rules, from the records alone
    report                      the page
    reproduce, workers          which parts run, in which processes
"""

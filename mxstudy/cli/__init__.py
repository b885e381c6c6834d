"""The command line: Hydra composes the configs, and mxstudy.launch plans and runs them.

A single run is a sweep of one job, so there is one path: main -> through_hydra.hand_over -> Hydra ->
hydra_plugins/mxstudy_launcher.py -> through_hydra.launch_jobs -> composing.compose -> mxstudy.launch. No module below
this room uses Hydra.

`main` tells apart what a command asks for, `through_hydra` hands it to Hydra and takes its jobs back, and `composing`
makes the config of each job. `registered` is what Hydra is told before, `corpora` adds to a blend the corpora that it
names, `chosen` checks the choices of groups, and `shown` prints configs in place of a launch.
"""

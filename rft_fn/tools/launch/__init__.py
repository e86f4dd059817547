"""`rft launch`: the programs of a run, which one file names, started and ended together.

`roles` reads the file and puts addresses into its commands; `local_processes` runs them on this machine,
`slurm` and `kubernetes` write what a cluster takes.
"""

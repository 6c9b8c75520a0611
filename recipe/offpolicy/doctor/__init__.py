"""Check, without a GPU and without Ray, that the correction of a launch takes effect.

    python -m recipe.offpolicy.doctor 'correction=[tis_token,gsm]' data.train_files=...
    python -m recipe.offpolicy.doctor --module verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=token ...
    python -m recipe.offpolicy.doctor --script run.sh [arguments of the script]
    python -m recipe.offpolicy.doctor --script run.sh '+correction@correction=[tis_token,gsm]'

Composes the configuration that the launch would train with, runs all start-up checks, and reports for each correction
OK, NO-OP because ..., or ERROR because ..., with the override that fixes it. verl's own validation runs too, except for
the critic and LoRA's rank, which only the launch validates.

The last form shows what your script would do with that override appended; the script must pass its arguments on, with
"$@" at the end of the launch.

The doctor reads a script without running it, and imports no code that is in the script's folder or that the script
names. The doctor reports the checks that it skips for this reason. (With `python -P -m ...`, Python's own start-up does
not import from the current folder either.) Each launch in a loop or a function is judged, and the worst verdict counts.
Only programs that print and change nothing are run: basename, cat, cut, date, dirname, expr, grep, head, hostname,
nproc, readlink, realpath, seq, tail, tr, uname, wc, whoami, and Python code that only looks up releases of packages and
locations of modules, in an isolated interpreter. Each of these programs may use 5 seconds, 512 MiB of memory and 1 MiB
of output; reading the whole script may take 20 seconds.

Exit status: 0 if every configured correction is OK, or none is configured; 1 if a correction is NO-OP, which means that
it would have no effect; 2 if a correction is ERROR, which means that it would not do what its name says, or would end
the run. The status is also 2 if no configuration can be composed, or if the doctor itself fails.
"""

"""Check before a launch that its correction is read, without a GPU and without Ray.

    python -m recipe.offpolicy.doctor 'correction=[tis_token,gsm]' data.train_files=...
    python -m recipe.offpolicy.doctor --module verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=token ...
    python -m recipe.offpolicy.doctor --script run.sh [arguments of the script]
    python -m recipe.offpolicy.doctor --script run.sh '+correction@correction=[tis_token,gsm]'

Composes the configuration that the launch would train with, runs every check of its start, and says of each correction
OK, NO-OP because ..., or ERROR because ..., with the override that mends it. verl's own validation runs too; that of
the critic and of LoRA's rank is left to the launch.

The last form asks what a script of yours would do with that override behind it; the script has to hand its arguments
on, by "$@" at the end of the launch.

A script is read, not run, and no code of its folder or that it names is imported: what could not be checked for that
reason is said. (`python -P -m ...` keeps Python's own start from the current folder, too.) Each launch of a loop or a
function is judged, and the worst verdict counts. Of its programs only those are called that look, print and change
nothing: basename, cat, cut, date, dirname, expr, grep, head, hostname, nproc, readlink, realpath, seq, tail, tr, uname,
wc, whoami, and Python code that does no more than ask for releases of packages and places of modules, in an isolated
interpreter. Each has 5 seconds, 512 MiB of memory and 1 MiB of output; the script as a whole has 20 seconds.

Exit status: 0 everything configured is OK, or nothing is configured; 1 something is NO-OP, it would do nothing;
2 something is ERROR, it would do something else than it says or end the run, there is no configuration,
or the doctor itself failed.
"""

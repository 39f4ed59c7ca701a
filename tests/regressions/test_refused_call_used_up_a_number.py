"""An unnamed call that was refused on one rank had already taken its automatic number there: from then on that rank's
unnamed operations waited for names that the others never used."""
import ranks


def test_unnamed_operations_meet_after_a_refused_call():
    ranks.run_script("""
import numpy, lightcc.numpy as hvd
hvd.init()
if hvd.rank() == 0:
    for call in (lambda: hvd.broadcast(numpy.ones(1), root_rank=99),
                 lambda: hvd.allreduce(numpy.ones(2, int), op=hvd.Adasum)):
        try:
            call()
            raise SystemExit("the call was not refused")
        except ValueError:
            pass
assert hvd.broadcast(numpy.full(1, hvd.rank()), root_rank=1) == 1
assert hvd.allreduce(numpy.ones(1), op=hvd.Sum) == 2
""", np=2, deadline_s=120)

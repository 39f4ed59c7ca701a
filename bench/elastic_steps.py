"""What the workers of bench/elastic.py and elastic_timeline.py have in common: steps for ever, each committed."""
import sys
import time


def steps_for_ever(state, step, images, hvd, device_s):
    """Calls step(), commits, and has rank 0 say when each was done. state: of the job, with a step. images: of a rank's
    batch. hvd: lightcc's package. device_s: seconds that a step takes beside the processor's time."""
    while True:
        step()
        state.step += 1
        state.commit()
        if hvd.rank() == 0:
            sys.stdout.write(f"step {state.step} size {hvd.size()} images {images * hvd.size()} "
                             f"at {time.monotonic():.6f}\n")
            sys.stdout.flush()
        time.sleep(device_s)

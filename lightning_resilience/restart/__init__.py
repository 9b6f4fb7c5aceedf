"""Going on in the same process after a fault. Nothing here knows of Lightning. In the order a restart happens:

watchdog    notices that this rank makes no progress
peers       the processes of other ranks on this machine
roll        which ranks are still there: pulses and silence
lookout     notices the end of a process at once, and the silence of rank 0
company     what one rank knows of the others, from these three
control     the store through which ranks tell each other of faults
interrupt   brings the thread that trains out of what it does
abort       ends the collectives it is blocked in
fence       keeps an optimizer's update in one piece
meeting     what each rank says of itself, and what follows from all of it
health      whether this rank is fit to go on
policy      whether to go on at all
world       going on with fewer ranks
engine      does all of this, in this order
events      tells people, in a file and a line of the log
"""

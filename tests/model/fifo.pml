/* One FIFO: two roles of a block push requests, the proxy pops them.
 *
 * protocol.pml takes a FIFO for a bounded channel: what is pushed comes out once, whole
 * and in each role's order, and a role that waits for room gets it. This shows that it
 * is one. Every store is a step of its own; steps of all processes interleave, those of
 * one process stay in order (which release and acquire have to ensure).
 */
#define PUSHES 3                   /* by each role; the FIFO wraps several times */
#define ENTRY(sequence) ((sequence) % DEPTH)

byte role_of[DEPTH], item_of[DEPTH], commit[DEPTH];
byte tickets, freed;
byte popped[2];                    /* by role */
bit aborted;

#ifdef ABORTS
#define WAYS_OUT :: aborted -> goto ended
#else
#define WAYS_OUT
#endif

proctype role(byte r) {
    byte item, sequence;

    do
    :: item == PUSHES -> break
    :: else ->
        item++;
#ifdef TICKET_NOT_ATOMIC
        sequence = tickets; tickets = sequence + 1;
#else
        atomic { sequence = tickets; tickets++ }
#endif
#ifdef RESERVED_NOT_COMMITTED
        if :: r == 0 && item == 2 -> goto ended :: else fi;
#endif
#ifndef FIFO_OVERWRITE
        do
        :: sequence - freed < DEPTH -> break
        WAYS_OUT
        od;
#endif
#ifdef COMMIT_FIRST
        commit[ENTRY(sequence)] = sequence + 1;
#endif
        role_of[ENTRY(sequence)] = r;
        item_of[ENTRY(sequence)] = item;
        commit[ENTRY(sequence)] = sequence + 1
    od;
    /* Before the operation returns, the proxy has taken all of it. */
    do
    :: freed > sequence -> break
    WAYS_OUT
    od;
ended:
    skip
}

proctype proxy() {
    byte taken, r, item;
end:
    do
    :: commit[ENTRY(taken)] == taken + 1 ->
#ifdef FREE_FIRST
        freed = taken + 1;
#endif
        r = role_of[ENTRY(taken)];
        item = item_of[ENTRY(taken)];
        taken++;
        freed = taken;
        popped[r]++;
        assert(item == popped[r])
    od
}

init {
    atomic { run role(0); run role(1); run proxy() }
#ifdef ABORTS
    aborted = 1
#endif
}

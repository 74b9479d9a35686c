/* The protocol of docs/architecture.md: rows, rings, credit, proxy, abort, farewell.
 *
 * One rank is three kinds of process:
 *   rank    its kernels and the host's calls: a sequence of operations, then destroy
 *   proxy   FIFO entry -> queue of (peer, channel), or parked for that queue alone
 *   link    one queue: delivers in order, the data of a request before its counter
 * Every slot and row holds which (operation, source, position) was written to it, and
 * nothing (0) once it has been used: an assertion sees the overwritten unread slot and
 * the stale read. A wait is a statement that cannot run yet, so there are no cycles: a
 * model without an invalid end state is one in which every operation ends.
 *
 * Left out: how a chunk is packed by several warps (here in one step, as is the reading
 * of one row), tokens on both channels at once, memory order within a rank, and that a
 * newer head replaces a parked one. One receiver warp a channel.
 *
 * check.py gives the configuration as macros, and breaks one rule at a time by others;
 * its table says which. fifo.pml looks into the FIFO, a plain channel here.
 */
#define QUEUES (CHANNEL + 1)       /* rows use channel 0, tokens CHANNEL (0 or 1) */
#define SLOTS (N * MAX_CAPACITY)
#define RING(src, dst) ((src) * N + (dst))
#define QUEUE(src, dst, ch) (RING(src, dst) * QUEUES + (ch))
#define ROUTED(rank, t, peer) ((route[(rank) * T + (t)] >> (peer)) & 1)
#define CONTENT(n, src, position) (((n) * 4 + (src)) * 16 + (position) + 1)
#define ROW(n, status, count) ((n) * 32 + (status) * 16 + (count))

#ifdef ONE_ROW_AREA
#define AREA(n) 0
#else
#define AREA(n) ((n) % 2)
#endif
#define ROW_AT(src, dst, n) (RING(src, dst) * 2 + AREA(n))

mtype = { DISPATCH, CACHED, COMBINE, PUT, HEAD, PUT_ROW, FAREWELL };

/* The configuration; hidden: no part of the state. route: by (rank, token), one bit for
 * every rank that the token goes to. The others: by operation of the sequence. */
hidden byte route[N * T] = ROUTE;
hidden mtype kind[OPERATIONS] = KIND;
hidden byte capacity[OPERATIONS] = CAPACITY;
hidden byte chunk[OPERATIONS] = CHUNK;

#include "network.pml"

/* Rows between two ranks, by the routing: what the row of notify or the handle says. */
inline count_rows(result, src, dst) {
    result = 0;
    for (k : 0 .. T - 1) {
        result = result + (kind[i] == COMBINE -> ROUTED(dst, k, src) :
                                                 ROUTED(src, k, dst))
    }
    k = 0
}

/* Any rank that would receive more rows than WORST: each row has the whole vector. */
inline find_too_many() {
    for (d : 0 .. N - 1) {
        received = 0;
        for (p : 0 .. N - 1) {
            count_rows(rows, p, d);
            received = received + rows
        }
#ifdef VERDICT_FROM_UNEQUAL_PARTS
        if :: d == r && received > WORST -> refused = true :: else fi
#else
        if :: received > WORST -> refused = true :: else fi
#endif
    }
    d = 0; received = 0; rows = 0
}

#define REFUSES(rank) ((rank) == REFUSER && i == REFUSED)

inline push_row(dst) {
    assert(send_row[ROW_AT(r, dst, n)] == 0);       /* the last one has left */
    count_rows(rows, r, dst);
    send_row[ROW_AT(r, dst, n)] = ROW(n, REFUSES(r), rows);
    push(0, PUT_ROW, dst, ROW_AT(r, dst, n), ROW_AT(r, dst, n), 1, n);
    rows = 0
}

#define ROW_HERE(src) (row_counter[RING(src, r)] >= n)

inline count_all() {
    for (p : 0 .. N - 1) { count_rows(out[p], r, p); count_rows(in[p], p, r) }
    p = 0
}

/* The verdict. The own row was never posted; the others are used up here. */
inline judge() {
    refused = REFUSES(r);
    for (p : 0 .. N - 1) {
        if
        :: p != r ->
            rows = row[ROW_AT(p, r, n)];
            assert(rows / 32 == n);                 /* a stale row */
            assert(rows % 16 == in[p]);
            row[ROW_AT(p, r, n)] = 0;
            if :: (rows / 16) % 2 -> refused = true :: else fi
        :: else
        fi
    }
    rows = 0;
    find_too_many();
    p = 0
}

/* Positions below this may be packed. None while credit of the operation before is on
 * its way. */
#ifdef REUSE_EARLY
#define CREDIT(d) (head[RING(r, d)] + capacity[i] - tail_cursor[d])
#else
#define CREDIT(d) (head[RING(r, d)] < tail_cursor[d] -> 0 : \
                   head[RING(r, d)] + capacity[i] - tail_cursor[d])
#endif
#define NEXT(d) (out[d] - sent[d] < chunk[i] -> out[d] - sent[d] : chunk[i])
/* At either end the rings lie one behind the other, by peer. */
#define SLOT(at, peer, position) \
    ((at) * SLOTS + (peer) * capacity[i] + (position) % capacity[i])
#define ROOM(peer) ((peer) == r || nfull(FIFO(r, CHANNEL)))

/* A sender goes on with another peer where there is no credit. BLOCKING_SENDER serves
 * one after the other, itself last. */
#define TURN(d) (((d) + 2 * N - 1 - r) % N)
#define SERVED(e, d) (TURN(e) >= TURN(d) || sent[e] == out[e])
#ifdef BLOCKING_SENDER
#define MAY_SERVE(d) (SERVED(0, d) && SERVED(1, d) && SERVED(N - 1, d))
#else
#define MAY_SERVE(d) true
#endif

/* Pack one chunk and publish it. Own rows go straight into the own receive ring. */
#define SEND(d) \
    :: d_step { sent[d] < out[d] && sent[d] + NEXT(d) <= CREDIT(d) && ROOM(d) \
                && MAY_SERVE(d) -> send_chunk(d) }
inline send_chunk(dst) {
    rows = NEXT(dst);
    p = SLOT(r, dst, sent[dst]);
    for (k : 0 .. rows - 1) {
        if
        :: dst == r ->
            assert(receive[p + k] == 0);
            receive[p + k] = CONTENT(n, r, sent[dst] + k)
        :: else ->
            assert(send[p + k] == 0);               /* what lay there has left */
            send[p + k] = CONTENT(n, r, sent[dst] + k)
        fi
    }
    k = SLOT(dst, r, sent[dst]);                    /* there, the ring is ours */
    sent[dst] = sent[dst] + rows;
    if
    :: dst == r -> tail[RING(r, r)] = tail_cursor[dst] + sent[dst]
    :: else ->
        push(CHANNEL, PUT, dst, p, k, rows, tail_cursor[dst] + sent[dst])
    fi;
    rows = 0; p = 0; k = 0
}

#define HERE(s) (tail[RING(s, r)] > head_cursor[s] + read[s])
inline read_row(src) {
    p = SLOT(r, src, read[src]);
    assert(receive[p] == CONTENT(n, src, read[src]));
    receive[p] = 0;
    read[src]++;
    p = 0
}

/* Dispatch takes rows as they come, exactly as many as the row announced. */
#ifdef UP_TO_TAIL
#define ALL_READ(s) (!HERE(s))
#else
#define ALL_READ(s) (read[s] == in[s])
#endif
#define RECEIVE(s) \
    :: d_step { kind[i] != COMBINE && read[s] < in[s] && HERE(s) -> read_row(s) }

/* Combine needs, token by token, the row of every rank that got the token. */
#define TOKEN_HERE(s) (!ROUTED(r, token, s) || HERE(s))
#define REDUCE \
    :: d_step { kind[i] == COMBINE && token < T && TOKEN_HERE(0) && TOKEN_HERE(1) \
                && TOKEN_HERE(N - 1) -> reduce_token() }
inline reduce_token() {
    for (d : 0 .. N - 1) {
        if :: ROUTED(r, token, d) -> read_row(d) :: else fi
    }
    d = 0; token++
}

/* Credit goes back a chunk at a time, and the rest at the end. */
#ifdef LAST_CREDIT_FORGOTTEN
#define ALL_BACK(s) (in[s] - returned[s] < chunk[i])
#define DUE(s) (read[s] - returned[s] >= chunk[i])
#else
#define ALL_BACK(s) (returned[s] == read[s])
#define DUE(s) (read[s] - returned[s] >= chunk[i] \
                || (read[s] == in[s] && returned[s] < read[s]))
#endif
#define RETURN(s) :: d_step { DUE(s) && ROOM(s) -> return_credit(s) }
inline return_credit(src) {
    if
    :: src == r -> head[RING(r, r)] = head_cursor[src] + read[src]
    :: else ->
        push(CHANNEL, HEAD, src, 0, 0, 0, head_cursor[src] + read[src])
    fi;
    returned[src] = read[src]
}

#define PEER_DONE(p) (sent[p] == out[p] && ALL_READ(p) && ALL_BACK(p))
#define ALL_DONE (PEER_DONE(0) && PEER_DONE(1) && PEER_DONE(N - 1) \
                  && (kind[i] != COMBINE || token == T))

/* Each end's cursor moves by the rows of the operation. */
inline move_cursors() {
    for (p : 0 .. N - 1) {
        tail_cursor[p] = tail_cursor[p] + out[p];
#ifndef CURSOR_NOT_MOVED
        head_cursor[p] = head_cursor[p] + in[p];
#endif
        sent[p] = 0; read[p] = 0; returned[p] = 0
    }
    p = 0; token = 0
}

inline meet() {
    do
    :: atomic { ROW_HERE(0) && ROW_HERE(1) && ROW_HERE(N - 1) ->
                d_step { skip; count_all(); judge() }; break }
    WAYS_OUT
    od
}

inline move_tokens() {
    do
    SEND(0) SEND(1) RECEIVE(0) RECEIVE(1) RETURN(0) RETURN(1)
#if N > 2
    SEND(2) RECEIVE(2) RETURN(2)
#endif
    REDUCE
    :: atomic { ALL_DONE -> d_step { skip; move_cursors() }; break }
    WAYS_OUT
    od
}

inline say_farewell() {
    for (p : 0 .. N - 1) {
        for (k : 0 .. QUEUES - 1) {
            if
#ifdef FAREWELL_ON_ONE_QUEUE
            :: p != r && k > 0 -> farewell[QUEUE(r, p, k)] = 1
            :: p != r && k == 0 ->
#else
            :: p != r ->
#endif
                outgoing[r]++;
                post(QUEUE(r, p, k), FAREWELL, 0, 0, 0, 0)
            :: else -> farewell[QUEUE(r, r, k)] = 1
            fi
        }
    }
    p = 0; k = 0
}

/* What is parked goes first on its queue, so the FIFOs are all that must be empty. */
#ifdef FAREWELL_BEFORE_DRAINED
#define DRAINED true
#else
#define DRAINED (empty(FIFO(r, 0)) && empty(FIFO(r, CHANNEL)))
#endif
#define LEFT(s) (farewell[QUEUE(s, r, 0)] && farewell[QUEUE(s, r, CHANNEL)])

inline destroy() {
    do
    :: atomic { DRAINED -> d_step { skip; say_farewell() }; break }
    WAYS_OUT
    od;
    do
#ifdef FREE_WITHOUT_FAREWELL
    :: atomic { outgoing[r] == 0 -> break }
#elif defined(FREE_BEFORE_REAPED)
    :: atomic { LEFT(0) && LEFT(1) && LEFT(N - 1) -> break }
#else
    :: atomic { LEFT(0) && LEFT(1) && LEFT(N - 1) && outgoing[r] == 0 -> break }
#endif
    WAYS_OUT
    od;
    freed[r] = 1
}

proctype rank(byte r) {
    byte i, n, token;              /* place in the sequence, operation number */
    byte p, d, k, rows, received;  /* 0 between steps */
    byte out[N], in[N], sent[N], read[N], returned[N];
    byte tail_cursor[N], head_cursor[N];
    bool refused;

    do
    :: i == OPERATIONS -> break
    :: else ->
        n++;
        do
        :: p == N -> p = 0; break
        :: d_step { p == r -> row_counter[RING(r, r)] = n; p++ }
        :: d_step { p < N && p != r && nfull(FIFO(r, 0)) -> push_row(p); p++ }
        WAYS_OUT
        od;
#ifdef MEET_LATE
        if :: kind[i] == DISPATCH -> meet() :: else -> d_step { skip; count_all() } fi;
#else
        meet();
#endif
        if
        :: refused ->
#ifdef REFUSAL_NOT_CONSUMED
            if :: REFUSES(r) -> n-- :: else fi
#endif
            skip
        :: else ->
#ifdef SLOT_FROM_POLLED_WORD
            d_step {
                skip;
                for (p : 0 .. N - 1) { head_cursor[p] = tail[RING(p, r)] }
                p = 0
            }
#endif
            move_tokens()
        fi;
#ifdef MEET_LATE
        if :: kind[i] != DISPATCH -> meet() :: else fi;
#endif
        refused = false; i++
    od;
    destroy();
ended:
    skip
}

init {
    byte s, d;
    atomic {
        for (s : 0 .. N - 1) {
            run rank(s); run proxy(s);
            for (d : 0 .. N - 1) {
                if
                :: s != d -> run link(s, d, 0); if :: CHANNEL -> run link(s, d, 1)
                                                   :: else fi
                :: else
                fi
            }
        }
        s = 0; d = 0
    }
}

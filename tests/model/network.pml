/* What ranks share: memory that others write, the proxy and the queues of each, and how
 * a wait ends when the others do not come. Included by protocol.pml.
 */

/* Send regions: send rings and rows on their way out. */
byte send[N * SLOTS], send_row[N * N * 2];
/* Receive regions: rings, rows, counters. tail and farewell of (src, dst) lie at dst,
 * head at src. tail, head and row_counter are absolute and only grow. */
byte receive[N * SLOTS], row[N * N * 2];
byte tail[N * N], head[N * N], row_counter[N * N];
bit farewell[N * N * QUEUES];

byte outgoing[N];                  /* requests that the proxy and NIC of a rank owe */
bit freed[N], stopped[N], aborted[N];
byte told[N];                      /* peers to which the proxy has written the abort */
bit clock_used;

/* Requests: what, (peer,) where the data lies here and there, slots, counter value. */
#define FIFO(r, ch) fifo[(r) * QUEUES + (ch)]
chan fifo[N * QUEUES] = [FIFO_DEPTH] of { mtype, byte, byte, byte, byte, byte };
chan queue[N * N * QUEUES] = [QUEUE_DEPTH] of { mtype, byte, byte, byte, byte };
chan parked[N * N * QUEUES] = [PARKED] of { mtype, byte, byte, byte, byte };

/* Ways out of a wait. A rank may stop while others wait for it (it dies: its proxy and
 * all queues to and from it stand still), or give up too early (GIVES_UP: a clock that
 * ran out, an error after the verdict). The clock of a wait runs out only when nothing
 * can happen any more (`timeout`), and only one clock may be needed: the other ranks
 * must hear of the abort. */
#ifdef NO_ABORT_CHECK
#define HEARS false
#else
#define HEARS aborted[r]
#endif
#ifndef STOPS
#define STOPS N
#endif
#ifndef GIVES_UP
#define GIVES_UP N
#endif
#if STOPS < N && !defined(NO_CLOCK)
#define CLOCK :: atomic { timeout -> assert(!clock_used); clock_used = 1; \
                          aborted[r] = 1; goto ended }
#else
#define CLOCK
#endif
#define WAYS_OUT \
    :: HEARS -> goto ended \
    :: r == STOPS -> stopped[r] = 1; goto ended \
    :: atomic { r == GIVES_UP -> aborted[r] = 1; goto ended } \
    CLOCK

/* A request that its queue refuses is parked; behind it nothing may overtake. */
inline post(to, what, here, there, count, value) {
    if
    :: nfull(queue[to]) && empty(parked[to]) ->
        queue[to]!what, here, there, count, value
    :: full(queue[to]) || nempty(parked[to]) ->
        assert(nfull(parked[to]));                  /* the model's bound */
        parked[to]!what, here, there, count, value
    fi
}

/* Through the FIFO; EAGER_PROXY has the proxy take the entry in the same step. */
inline push(ch, what, peer, here, there, count, value) {
    outgoing[r]++;
#ifdef EAGER_PROXY
    post(QUEUE(r, peer, ch), what, here, there, count, value)
#else
    FIFO(r, ch)!what, peer, here, there, count, value
#endif
}

#ifdef HEAD_OF_LINE
#define POP(ch, end) \
    :: atomic { !stopped[r] && nempty(FIFO(r, ch)) -> \
                FIFO(r, ch)?<what, peer, here, there, count, value> }; \
       end: \
       d_step { nfull(queue[QUEUE(r, peer, ch)]) -> \
                FIFO(r, ch)?what, peer, here, there, count, value; \
                queue[QUEUE(r, peer, ch)]!what, here, there, count, value; \
                what = 0; peer = 0; here = 0; there = 0; count = 0; value = 0 }
#else
#define POP(ch, end) \
    :: d_step { !stopped[r] && nempty(FIFO(r, ch)) -> \
                FIFO(r, ch)?what, peer, here, there, count, value; \
                post(QUEUE(r, peer, ch), what, here, there, count, value); \
                what = 0; peer = 0; here = 0; there = 0; count = 0; value = 0 }
#endif

proctype proxy(byte r) {
    mtype what;
    byte peer, here, there, count, value;
end:
    do
    POP(0, end_0)
#if CHANNEL > 0
    POP(1, end_1)
#endif
#ifndef NO_ABORT_WORDS
    /* Past the FIFO and the queues; only the first cause counts, so 1 will do. It may
     * come after the farewell, to a rank that has freed its memory: the one write for
     * which that is not asserted. */
    :: atomic { aborted[r] && !stopped[r] && told[r] < N ->
                aborted[told[r]] = 1; told[r]++ }
#endif
    od
}

inline deliver_data() {
    if
    :: what == PUT_ROW ->
        assert(row[there] == 0);                    /* an overwritten unread row */
        row[there] = send_row[here]; send_row[here] = 0
    :: what == PUT ->
        for (k : 0 .. count - 1) {
            assert(receive[there + k] == 0);        /* an overwritten unread slot */
            receive[there + k] = send[here + k]; send[here + k] = 0
        }
        k = 0
    fi
}

inline deliver_counter() {
    if
    :: what == PUT -> tail[RING(src, dst)] = value
    :: what == PUT_ROW -> row_counter[RING(src, dst)] = value
    :: what == HEAD -> head[RING(dst, src)] = value
    :: what == FAREWELL -> farewell[QUEUE(src, dst, ch)] = 1
    fi
}

/* Is the counter of this request delivered before its data? */
#ifdef TAIL_FIRST
#define COUNTER_FIRST (what == PUT)
#elif defined(ROW_COUNTER_FIRST)
#define COUNTER_FIRST (what == PUT_ROW)
#else
#define COUNTER_FIRST false
#endif

/* The completion makes room in the queue, and the proxy posts what it had parked: one
 * step, for nobody can see the time between. */
inline complete() {
    queue[QUEUE(src, dst, ch)]?what, here, there, count, value;
    outgoing[src]--;
    if
    :: nempty(parked[QUEUE(src, dst, ch)]) ->
        parked[QUEUE(src, dst, ch)]?what, here, there, count, value;
        queue[QUEUE(src, dst, ch)]!what, here, there, count, value
    :: empty(parked[QUEUE(src, dst, ch)])
    fi
}

proctype link(byte src, dst, ch) {
    mtype what;
    byte here, there, count, value, k;
    bool half;
end:
    do
    :: d_step { !stopped[src] && !stopped[dst] && nempty(queue[QUEUE(src, dst, ch)]) ->
        queue[QUEUE(src, dst, ch)]?<what, here, there, count, value>;
        assert(!freed[src] && !freed[dst]);
        if
        :: what == HEAD || what == FAREWELL -> deliver_counter(); half = true
        :: else -> if :: half == COUNTER_FIRST -> deliver_data()
                      :: else -> deliver_counter() fi
        fi;
        if
        :: half -> complete(); half = false
        :: else -> half = true
        fi;
        what = 0; here = 0; there = 0; count = 0; value = 0 }
    od
}

package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A wire is the one connection on which a Locker holds all its advisory locks. Many callers
// share it without a goroutine in between.
//
// A caller that finds the wire free leads: it sends its requests itself, and reads the answer.
// Requests of other callers wait in a queue meanwhile. Then the leader hands the lead to the
// first of them, which sends all queued requests in one message. So a single caller pays one
// round trip and nothing else, and 256 callers pay one together. After a moment without
// requests, a goroutine takes the lead and reads, so that the end of the session is noticed at
// once; it also pings. While callers receive their answers, the server already works on the
// next message.
//
// No context of a caller reaches the connection: if the leader's context ends, a goroutine
// goes on reading.
type wire struct {
	connect func() (*lockConn, error)
	backoff func(attempt int) time.Duration
	clock   clock.Clock
	ttl     time.Duration // the server ends a session that is silent for so long; 0: never
	margin  time.Duration

	// alive is called with a time at which the session was alive; lost, when the session has
	// ended and all its locks are lost.
	alive func(sent time.Duration)
	lost  func(why error)

	mu       sync.Mutex
	queue    []*lockCall
	led      bool      // there is a leader
	leader   *lockCall // its caller leads; nil: a goroutine does
	leaves   bool      // the leader's context has ended
	idle     bool      // the leader is the goroutine that reads, and can be interrupted
	conn     *lockConn // nil: none; only leaders change it
	failures int       // of connect, in a row
	sends    int       // how many messages were sent
	closed   bool
	gone     chan struct{} // closed after close, when there is no connection any more
	farewell sync.Once
	wakes    sync.Pool // of empty channels for lockCall.wake: a caller receives each signal that is sent

	// Only the leader uses these.
	roundTrip               // in flight, if its batch is not empty
	spare     roundTrip     // memory for the next one
	sent      time.Duration // the time before the last message that the server answered without an error
	confirmed time.Duration // the last argument of alive
}

// A roundTrip is a message and the calls whose requests it carries.
type roundTrip struct {
	message message
	batch   []*lockCall
}

// maxBatch is how many requests one message carries, unless one call has more.
const maxBatch = 256

// linger is how long after the last call the goroutine reads again, and how often it checks
// the leader's context.
const linger = 2 * time.Millisecond

// maxReconnectDelay bounds Backoff while reconnecting: Backoff is meant for busy keys, and
// callers that wait for a connection wait for no holder.
const maxReconnectDelay = time.Second

// A lockCall is the requests of one caller to the lock session, and the answers.
type lockCall struct {
	ctx     context.Context
	closing <-chan struct{} // closed when its caller must not wait any longer; nil: never
	asks    []ask
	query   string // sent instead of asks, if it is not empty
	alone   bool   // it has a message of its own
	undo    bool   // it is from wire.undo: if it fails, the session must end

	bound   bool // it makes sense only in the session for which it was made
	retried bool // it was sent once, and has no answer

	answers []lockAnswer
	one     [1]lockAnswer
	rows    [][]string // of query
	err     error
	sent    time.Duration // the time before it was sent

	asker asker // may be nil

	state atomic.Int32
	wake  chan struct{} // has room for the one signal that is sent; nil until its caller has to wait
}

// An asker processes the answer to its call. The leader calls answered, for one call after the
// other in their order. left: the caller does not wait any more. now is the time after the
// answer arrived.
type asker interface {
	answered(left bool, now time.Duration)
}

// The states of a call.
const (
	callQueued  int32 = iota
	callLeads         // its caller leads, or is woken to lead
	callLeft          // its caller does not wait for it
	callSettled       // it has its answer
)

var errSilentTooLong = errors.New("the connection was silent for so long that the server may have ended the session")

// await waits for the answer to a call that was submitted, and leads if leads is true or when
// the lead is handed to it. It returns false if the caller leaves before the answer, which then
// goes to c.asker only; c.why has the reason.
func (w *wire) await(c *lockCall, leads bool) bool {
	defer w.expectNoWake(c)
	for waits := !leads; ; {
		if waits && !c.woken() {
			if c.state.CompareAndSwap(callQueued, callLeft) {
				return false
			}
			<-c.wake
		}
		if c.state.Load() == callLeads {
			if waits = w.lead(c); waits {
				continue // another leader changes its state now, and wakes it
			}
		}
		return c.state.Load() == callSettled
	}
}

// woken waits until the call is woken. It returns false if its caller leaves before.
func (c *lockCall) woken() bool {
	select {
	case <-c.wake:
		return true
	case <-c.ctx.Done():
	case <-c.closing:
	}
	return false
}

// why returns why the caller leaves, or nil if it does not. ctx is the call's.
func (c *lockCall) why(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-c.closing:
		return ErrClosed
	default:
		return nil
	}
}

// do sends a call whose answer no caller waits for.
func (w *wire) do(c *lockCall) {
	c.state.Store(callLeft)
	if w.submit(context.Background(), c) {
		go w.lead(nil)
	}
}

// submit queues a call. If it returns true, the caller must lead. ctx bounds how long the
// caller waits.
func (w *wire) submit(ctx context.Context, c *lockCall) (leads bool) {
	c.ctx = ctx
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, c)
	if !w.led && w.conn != nil {
		w.led, w.leader = true, c
		c.state.CompareAndSwap(callQueued, callLeads)
		return true
	}
	w.expectWake(c)
	switch {
	case w.idle:
		w.idle = false
		w.conn.interrupt()
	case !w.led:
		w.led = true
		go w.reconnect()
	}
	return false
}

// lead sends the queued calls until own is settled or its caller has left, and hands the lead
// on. Without a connection own goes back to waiting, and lead returns true.
func (w *wire) lead(own *lockCall) (waits bool) {
	for more := true; more; more = own != nil && own.state.Load() == callLeads {
		if len(w.batch) == 0 {
			if err := w.begin(); err != nil {
				w.end(err)
			}
		}
		if len(w.batch) == 0 {
			if w.conn == nil && own != nil {
				w.expectWake(own)
				waits = own.state.CompareAndSwap(callLeads, callQueued)
			}
		} else if !w.finish() {
			own.state.Store(callLeft)
			go func() {
				w.finish()
				w.pass()
			}()
			return false
		}
	}
	w.pass()
	return waits
}

// dismiss makes the leader leave if its context has ended. attend polls with it: watching each
// context would cost each call more than all the rest of the wire does.
func (w *wire) dismiss() {
	w.mu.Lock()
	leader := w.leader
	w.mu.Unlock()
	if leader == nil || leader.why(leader.ctx) == nil { // outside w.mu: Err may run callers' code
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leader == leader {
		w.leader, w.leaves = nil, true
		if w.conn != nil {
			w.conn.interrupt()
		}
	}
}

// pass hands the lead, and the round trip in flight, to the caller that has waited longest.
func (w *wire) pass() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leader, w.leaves = nil, false
	switch {
	case len(w.queue) > 0 && w.conn == nil:
		go w.reconnect()
	case len(w.batch) > 0 || len(w.queue) > 0:
		if !w.passToLocked(w.batch) && !w.passToLocked(w.queue) {
			go w.lead(nil) // no caller waits for these calls
		}
	case w.closed && w.conn != nil:
		go func() {
			w.end(ErrClosed)
			w.pass()
		}()
	default:
		w.led = false
		if w.closed {
			w.farewell.Do(func() { close(w.gone) })
		}
	}
}

// passToLocked makes the first caller that waits for one of the calls the leader.
func (w *wire) passToLocked(calls []*lockCall) bool {
	for _, c := range calls {
		if c.state.CompareAndSwap(callQueued, callLeads) {
			w.leader = c
			c.wake <- struct{}{}
			return true
		}
	}
	return false
}

// reconnect leads until there is a connection, or the queued calls have failed.
func (w *wire) reconnect() {
	w.mu.Lock()
	failures, closed := w.failures, w.closed
	w.mu.Unlock()
	var conn *lockConn
	err := ErrClosed
	if !closed {
		if failures > 0 {
			time.Sleep(min(w.backoff(failures-1), maxReconnectDelay))
		}
		conn, err = w.connect()
	}
	w.mu.Lock()
	var failed []*lockCall
	if err == nil {
		w.conn, w.failures = conn, 0
	} else {
		w.failures++
		failed, w.queue = w.queue, nil
	}
	w.mu.Unlock()
	for _, c := range failed {
		c.settle(err, w.clock())
	}
	if err == nil {
		w.sent, w.confirmed = conn.made, conn.made
		go w.attend(conn)
	}
	w.pass()
}

// attend reads and pings while there are no calls, and dismisses leaders.
func (w *wire) attend(conn *lockConn) {
	for seen := 0; ; {
		time.Sleep(linger)
		w.mu.Lock()
		if w.conn != conn {
			w.mu.Unlock()
			return
		}
		if w.led || w.sends != seen {
			seen = w.sends
			w.mu.Unlock()
			w.dismiss()
			continue
		}
		w.led, w.idle = true, true
		rest := time.Duration(0)
		if w.ttl > 0 {
			rest = max(w.sent+w.ttl/3-w.clock(), time.Millisecond)
		}
		conn.readFor(rest)
		w.mu.Unlock()

		err := conn.listen()

		w.mu.Lock()
		wanted := !w.idle
		w.idle = false
		if isTimeout(err) && !wanted {
			ping := &lockCall{bound: true}
			ping.state.Store(callLeft)
			w.queue = append(w.queue, ping)
		}
		w.mu.Unlock()
		switch {
		case !isTimeout(err):
			w.end(err)
			w.pass()
		case wanted:
			w.pass()
		default:
			w.lead(nil)
		}
	}
}

// begin sends the next batch, if there are calls. An error ends the session.
func (w *wire) begin() error {
	w.mu.Lock()
	conn := w.conn
	if conn != nil {
		w.takeLocked()
	}
	if len(w.batch) > 0 {
		w.sends++
	}
	w.mu.Unlock()
	if len(w.batch) == 0 {
		return nil
	}
	sent := w.clock()
	if w.ttl > 0 && sent >= w.sent+w.ttl-w.margin {
		return errSilentTooLong
	}
	for _, c := range w.batch {
		c.sent = sent
	}
	conn.write(&w.message, w.batch)
	return conn.send(&w.message)
}

// takeLocked moves the next batch out of the queue. Calls whose callers have left are sent as
// well: a later caller may wait for the answer to the same request.
func (w *wire) takeLocked() {
	asked, n := 0, 0
	for _, c := range w.queue {
		if len(w.batch) > 0 && (asked+len(c.asks) > maxBatch || c.alone || w.batch[0].alone) {
			break
		}
		n++
		asked += len(c.asks)
		w.batch = append(w.batch, c)
	}
	rest := copy(w.queue, w.queue[n:])
	clear(w.queue[rest:])
	w.queue = w.queue[:rest]
}

// finish receives the answer to a batch. It returns false if the leader's context ends before.
func (w *wire) finish() bool {
	conn := w.conn
	for {
		w.mu.Lock()
		left := w.leaves
		w.leaves = false
		w.mu.Unlock()
		if left {
			return false
		}
		err := conn.receive(&w.message)
		if err == nil {
			w.answered()
			return true
		}
		if isTimeout(err) {
			w.mu.Lock()
			over := conn.resume()
			w.mu.Unlock()
			if !over {
				continue
			}
			err = lockerr.ErrNoAnswer
		}
		w.end(err)
		return true
	}
}

// answered settles the calls of a batch after its answer.
func (w *wire) answered() {
	failed, ended := w.message.verdict()
	if ended != nil {
		w.end(ended)
		return
	}
	if failed != nil && w.batch[0].undo {
		w.end(failed) // then the server releases what was to be undone
		return
	}
	w.sent = w.batch[0].sent
	if failed != nil {
		w.undo()
	}
	done := w.roundTrip
	w.roundTrip = w.spare
	var broken error
	if failed == nil { // otherwise the calls of undo come first
		// The socket's buffer is empty. So only a message that is larger than the buffer, one
		// of AcquireAll, can block here on a dead network while received answers wait.
		broken = w.begin()
	}
	answers, now := done.message.answers, w.clock()
	for _, c := range done.batch {
		if failed == nil {
			c.answers = append(c.one[:0], answers[:len(c.asks)]...) // the message is used again
			answers = answers[len(c.asks):]
			c.rows = done.message.rows
		}
		c.settle(failed, now)
	}
	clear(done.batch)
	w.spare = roundTrip{done.message, done.batch[:0]}
	if w.ttl > 0 && w.sent-w.confirmed >= w.ttl/4 {
		w.confirmed = w.sent
		w.alive(w.sent)
	}
	if broken != nil {
		w.end(broken) // after the calls that were answered are settled: it ends their locks
	}
}

// undo releases, before any other request, what a failed statement may have acquired and what
// it was to release: advisory locks outlive the statement. Then each call but releases and
// queries is sent once more, alone: the statement may have been cancelled, or the request of
// another call in the batch may have been too much for the server.
func (w *wire) undo() {
	c := &lockCall{undo: true, alone: true, bound: true}
	c.state.Store(callLeft)
	var again []*lockCall
	settled := w.batch[:0]
	for _, failed := range w.batch {
		for _, a := range failed.asks {
			c.asks = append(c.asks, a.undone())
		}
		if failed.query == "" && !failed.releases() && !failed.retried {
			failed.retried, failed.alone = true, true
			again = append(again, failed)
		} else {
			settled = append(settled, failed)
		}
	}
	w.batch = settled
	if len(c.asks) > 0 {
		again = slices.Insert(again, 0, c)
	}
	w.mu.Lock()
	w.queue = slices.Insert(w.queue, 0, again...)
	w.mu.Unlock()
}

// releases reports whether the call is a release, which undo repeats.
func (c *lockCall) releases() bool {
	return len(c.asks) > 0 && c.asks[0] == c.asks[0].undone()
}

// end ends the session. A call without an answer is sent once more in the next session, unless
// it is bound to this one.
//
// lost is called first: before the server learns that the locks are free, and so that every
// call about a lock of this session is in the queue by then and fails with the session.
func (w *wire) end(why error) {
	w.lost(why)
	w.mu.Lock()
	conn := w.conn
	w.conn = nil
	waiting := w.queue
	w.queue = nil
	var failed []*lockCall
	for i, c := range slices.Concat(w.batch, waiting) {
		if c.bound || c.retried {
			failed = append(failed, c)
			continue
		}
		c.retried = i < len(w.batch)
		w.queue = append(w.queue, c)
	}
	w.batch = nil
	w.mu.Unlock()
	conn.close()
	for _, c := range failed {
		c.settle(fmt.Errorf("%w: %w", lockerr.ErrSessionEnded, why), w.clock())
	}
}

// expectWake gives a call a channel to wait on.
func (w *wire) expectWake(c *lockCall) {
	if c.wake != nil {
		return
	}
	if wake, ok := w.wakes.Get().(chan struct{}); ok {
		c.wake = wake
	} else {
		c.wake = make(chan struct{}, 1)
	}
}

func (w *wire) expectNoWake(c *lockCall) {
	if c.wake != nil {
		w.wakes.Put(c.wake)
		c.wake = nil
	}
}

// settle answers a call, and wakes its caller if it waits.
func (c *lockCall) settle(err error, now time.Duration) {
	c.err = err
	state := c.state.Load()
	for state != callLeft && !c.state.CompareAndSwap(state, callSettled) {
		state = c.state.Load()
	}
	if c.asker != nil {
		c.asker.answered(state == callLeft, now)
	}
	if state == callQueued {
		c.wake <- struct{}{}
	}
}

// close ends the connection after the calls in flight, and waits for that until ctx ends.
func (w *wire) close(ctx context.Context) error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	w.closed = true
	switch {
	case w.idle:
		w.idle = false
		w.conn.interrupt()
	case !w.led:
		w.led = true
		go w.pass()
	}
	w.mu.Unlock()
	select {
	case <-w.gone:
		return nil
	case <-ctx.Done():
		return lockerr.ContextError(ctx)
	}
}

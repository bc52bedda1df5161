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

// A wire is the one connection on which a Locker holds all its advisory locks,
// and the way in which many callers share it without a goroutine in between.
//
// Whoever finds it free leads: it sends what it wants itself, and takes in the
// answer. What others ask for meanwhile waits in a queue; the leader hands the
// lead on to the first of them, who sends all of it in one message. So one caller
// alone pays a round trip and nothing else, and 256 pay one together. When nobody
// has asked for a moment, a goroutine takes the lead and reads, so that the end of
// the session is known when it happens; it also pings. While callers hear their
// answers the server works on the next message already.
//
// No context of a caller reaches the connection: a leader whose context ends
// leaves the reading to a goroutine.
type wire struct {
	connect func() (*lockConn, error)
	backoff func(attempt int) time.Duration
	clock   clock.Clock
	ttl     time.Duration // the server ends a session that is silent for so long; 0: never
	margin  time.Duration

	// alive tells that the session was there at that reading of the clock. lost
	// tells that all it held is lost.
	alive func(sent time.Duration)
	lost  func(why error)

	mu       sync.Mutex
	queue    []*lockCall
	led      bool      // somebody leads
	leader   *lockCall // whose caller does; nil: a goroutine
	leaves   bool      // that caller's context has ended
	idle     bool      // the leader is the goroutine that reads, and can be interrupted
	conn     *lockConn // nil: none; changed by leaders only
	failures int       // of connect, in a row
	sends    int       // how many messages were sent
	closed   bool
	gone     chan struct{} // closed after close, when there is no connection any more
	farewell sync.Once
	wakes    sync.Pool // of channels for lockCall.wake: each signal that is sent is waited for

	// The leader's own.
	roundTrip               // under way, if its batch is not empty
	spare     roundTrip     // what the next one is made of
	sent      time.Duration // the clock before the last good message
	confirmed time.Duration // what alive was told
}

// A roundTrip is a message and the calls that its answer is for.
type roundTrip struct {
	message message
	batch   []*lockCall
}

// maxBatch is how many things one message asks for, unless one caller alone asks
// for more.
const maxBatch = 256

// linger is how long after the last call the session is read again, and how often
// a leader's context is looked at.
const linger = 2 * time.Millisecond

// maxReconnectDelay keeps a backoff that is meant for busy keys from keeping those
// waiting who do not wait for a holder.
const maxReconnectDelay = time.Second

// A lockCall is what one caller asks of the session, and the answer.
type lockCall struct {
	ctx   context.Context
	asks  []ask
	query string // is asked instead, if it is not empty
	alone bool   // not together with others
	undo  bool   // it must not fail

	bound   bool // has a meaning for the present session only
	retried bool // it was asked once, and had no answer

	answers []lockAnswer
	one     [1]lockAnswer
	rows    [][]string // of query
	err     error
	sent    time.Duration // the clock before it was sent

	asker asker // may be nil

	state atomic.Int32
	wake  chan struct{} // has room for the one signal that is sent; nil until it has to wait
}

// An asker is told of the answer to its call, in the order of the calls, by whoever
// leads; left says that its caller does not wait for it any more, and now is the
// clock after it came.
type asker interface {
	answered(left bool, now time.Duration)
}

// What becomes of a call: it begins in the queue.
const (
	callQueued  int32 = iota
	callLeads         // its caller leads, or is told to
	callLeft          // its caller does not wait for it
	callSettled       // it has its answer
)

var errSilentTooLong = errors.New("it was silent for so long that the server may have ended it")

// await waits for the answer to a call that was submitted, and leads if it is to.
// It returns false if c.ctx ended before: then the answer goes to c.asker alone.
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
				continue // its state is another leader's to look after: the wake says when
			}
		}
		return c.state.Load() == callSettled
	}
}

// woken waits to be woken; false if its context ended before.
func (c *lockCall) woken() bool {
	ended, closing := ends(c.ctx)
	select {
	case <-c.wake:
		return true
	case <-ended:
	case <-closing:
	}
	return false
}

// do sends a call that nobody waits for.
func (w *wire) do(c *lockCall) {
	c.state.Store(callLeft)
	if w.submit(context.Background(), c) {
		go w.lead(nil)
	}
}

// submit puts a call into the queue, and says whether to lead: then whoever has
// submitted it must. ctx bounds how long its caller waits.
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

// lead sends what is in the queue until own is settled or left, and hands the lead
// on. Without a connection own goes back to waiting, which it reports.
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

// dismiss makes the leader leave if its context has ended. It is asked for now and
// then: to watch each context would cost each call more than all that is done here.
func (w *wire) dismiss() {
	w.mu.Lock()
	leader := w.leader
	w.mu.Unlock()
	if leader == nil || leader.ctx.Err() == nil { // which may run code of others
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

// pass hands the lead on, with what is under way, to the one who has been waiting
// longest.
func (w *wire) pass() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leader, w.leaves = nil, false
	switch {
	case len(w.queue) > 0 && w.conn == nil:
		go w.reconnect()
	case len(w.batch) > 0 || len(w.queue) > 0:
		if !w.passTo(w.batch) && !w.passTo(w.queue) {
			go w.lead(nil) // there are only such as nobody waits for
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

// passTo makes the first who waits for one of the calls the leader; w.mu is held.
func (w *wire) passTo(calls []*lockCall) bool {
	for _, c := range calls {
		if c.state.CompareAndSwap(callQueued, callLeads) {
			w.leader = c
			c.wake <- struct{}{}
			return true
		}
	}
	return false
}

// reconnect leads until there is a connection, or calls have heard why not.
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

// attend reads while nobody asks for anything, and pings; and looks after leaders.
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

// begin sends the next batch, if anything is asked for. An error ends the session.
func (w *wire) begin() error {
	w.mu.Lock()
	conn := w.conn
	if conn != nil {
		w.take()
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

// take moves the next batch out of the queue. What was left is asked as well:
// somebody may have come after it who wants the same.
func (w *wire) take() {
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

// finish takes in the answer to a batch. It returns false if the leader's context
// ended before it was there.
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

// answered settles a batch.
func (w *wire) answered() {
	failed, ended := w.message.verdict()
	if ended != nil {
		w.end(ended)
		return
	}
	if failed != nil && w.batch[0].undo {
		w.end(failed) // then the server undoes it
		return
	}
	w.sent = w.batch[0].sent
	if failed != nil {
		w.undo()
	}
	done := w.roundTrip
	w.roundTrip = w.spare
	var broken error
	if failed == nil { // else the next thing is to undo
		// The socket's buffer is empty, so that only a message that is larger than it, one
		// of AcquireAll, can wait here, on a dead network, with answers that are there.
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
		w.end(broken) // not before those are settled whom it answered: it tells them that they have lost
	}
}

// undo gives back, before anything else is asked, what a statement that failed may
// have taken, and what it was to give back: locks of a session outlive it. Then
// each call that wanted some, or stood beside one that did, is asked once more, alone:
// the statement may have been cancelled, or another one's request may have been too
// much for the server.
func (w *wire) undo() {
	c := &lockCall{undo: true, alone: true, bound: true}
	c.state.Store(callLeft)
	var again []*lockCall
	settled := w.batch[:0]
	for _, failed := range w.batch {
		for _, a := range failed.asks {
			c.asks = append(c.asks, a.undone())
		}
		if failed.query == "" && !failed.givesBack() && !failed.retried {
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

// givesBack reports whether undo does what the call asks for.
func (c *lockCall) givesBack() bool {
	return len(c.asks) > 0 && c.asks[0] == c.asks[0].undone()
}

// end gives the session up. What it was asked and did not answer is asked once
// more on the next one, if that makes sense.
//
// The loss is told first: before the server hears that the locks are free, and so
// that whatever was asked of a lock of this session stands in its queue and fails
// with it.
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

// expectWake prepares a call for waiting.
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

// settle gives a call its answer, and wakes the caller if it waits.
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

// close ends the connection after what is under way, but not later than ctx.
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

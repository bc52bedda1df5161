package advisory

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A mux shares the lock session, the one connection that carries all of a process's advisory
// locks, among many callers without a goroutine in between.
//
// A caller that finds the mux free leads: it sends its requests itself, and reads the
// answer. Requests of other callers wait in a queue meanwhile. Then the leader hands the
// lead to the first of them, which sends all queued requests in one message. So a single
// caller pays one round trip and nothing else, and 256 callers pay one together. A leader
// waits a moment for callers that are about to ask (gathering); if most have asked by the
// time an answer arrives, it sends their message before it tells the answers. A release that
// is left to the next caller waits for that one's call. After a moment without requests, a
// goroutine takes the lead and reads, so that the end of the session is noticed at once; it
// also pings.
//
// No context of a caller reaches the connection: if the leader's context ends, a goroutine
// goes on reading.
type mux struct {
	connect func(context.Context) (*session, error) // opens the session
	clock   clock.Clock
	ttl     time.Duration // the server ends a session that is silent for so long; 0: never
	margin  time.Duration

	// alive is called with a time at which the session was alive; lost, when the session has
	// ended and all its locks are lost.
	alive func(sent time.Duration)
	lost  func(why error)

	connecting context.Context // of connect; ends with stop
	stop       context.CancelFunc

	wakes    sync.Pool     // of empty channels for call.wake: a caller receives each signal that is sent
	gone     chan struct{} // closed after close, when there is no connection any more
	farewell sync.Once     // closes gone

	// mu guards what follows. It is never held during an exchange with the server, nor while
	// code of a caller runs.
	mu      sync.Mutex
	queue   []*call  // not sent yet
	led     bool     // there is a leader
	leader  *call    // its caller leads; nil: a goroutine does
	leaves  bool     // the leader's context has ended
	idle    bool     // the leader is the goroutine that reads, and can be interrupted
	conn    *session // nil: none; only the leader changes it, and may read it without mu
	sends   int      // how many messages were sent
	closing bool     // callers do not wait any longer
	closed  bool
	brief   *time.Timer // makes brief calls leave that have waited long for a connection; nil: there are none

	// Only the leader uses these. The next leader sees them because it got the lead under mu, or
	// by a signal that was sent under mu.
	roundTrip                   // in flight, if its batch is not empty
	spare     roundTrip         // memory for the next one
	sent      time.Duration     // the time before the last message that the server answered without an error
	confirmed time.Duration     // the last argument of alive
	gathering batcher.Gathering // how the leader waits for callers that are about to ask
	spinning  spinning          // how it waits for the answer
}

// A roundTrip is a message and the calls whose requests it carries.
type roundTrip struct {
	message message
	batch   []*call
}

// linger is how long after the last call the goroutine reads again, and how often it checks
// the leader's context. While messages flow it checks less and less often, because each time wakes
// a thread and the scheduler's watcher: so just after a busy spell the end of the session is
// noticed mostLinger late and linger at most, and the leader of a server that falls silent leaves as
// late.
const (
	linger     = 2 * time.Millisecond
	mostLinger = 16 * time.Millisecond
)

// quietFor reports whether there were no calls for so long that the goroutine reads again: flows is
// whether messages were sent in its last sleep, since how long ago the last one was.
func quietFor(flows bool, since time.Duration) bool { return !flows || since >= linger }

// nextLinger returns how long to sleep after a sleep, in which messages were sent or not.
func nextLinger(slept time.Duration, flows bool) time.Duration {
	if flows {
		return min(2*slept, mostLinger)
	}
	return linger
}

var errSilentTooLong = errors.New("the connection was silent for so long that the server may have ended the session")

// await waits for the answer to a call that was submitted, and leads if leads is true or when
// the lead is handed to it. It returns false if the caller leaves before the answer, which then
// goes to c.asker only; c.why has the reason.
func (m *mux) await(c *call, leads bool) bool {
	defer m.forget(c)
	for waits := !leads; ; {
		if waits && !c.woken() {
			if c.state.CompareAndSwap(callQueued, callLeft) {
				return false
			}
			<-c.wake
		}
		if c.state.Load() == callLeads {
			if waits = m.lead(c); waits {
				continue // another leader changes its state now, and wakes it
			}
		}
		return c.state.Load() == callSettled
	}
}

// do sends a call whose answer no caller waits for.
func (m *mux) do(c *call) {
	c.state.Store(callLeft)
	if m.submit(context.Background(), c) {
		go m.lead(nil)
	}
}

// submit queues a call. If it returns true, the caller must lead. ctx bounds how long the
// caller waits.
func (m *mux) submit(ctx context.Context, c *call) (leads bool) {
	c.ctx = ctx
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queue = append(m.queue, c)
	if !m.led && m.conn != nil && !c.joins {
		m.led, m.leader = true, c
		c.state.CompareAndSwap(callQueued, callLeads)
		return true
	}
	m.expectWake(c)
	m.timeLocked(c)
	if !c.joins {
		m.rouseLocked()
	}
	return false
}

// rouse has the queued calls sent.
func (m *mux) rouse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rouseLocked()
}

// rouseLocked makes a goroutine lead, or hand on the lead, if nothing else leads.
func (m *mux) rouseLocked() {
	switch {
	case m.idle:
		m.idle = false
		m.conn.interrupt()
	case !m.led:
		m.led = true
		go m.pass()
	}
}

// lead sends the queued calls until own is settled or its caller has left, and hands the lead
// on. Without a connection own goes back to waiting, and lead returns true.
func (m *mux) lead(own *call) (waits bool) {
	for more := true; more; more = own != nil && own.state.Load() == callLeads {
		if len(m.batch) == 0 {
			m.gathering.Wait(m.queued)
			if err := m.begin(); err != nil {
				m.end(err)
			}
		}
		if len(m.batch) == 0 {
			if m.conn == nil && own != nil {
				m.expectWake(own)
				waits = own.state.CompareAndSwap(callLeads, callQueued)
			}
		} else if !m.finish() {
			own.state.Store(callLeft)
			go func() {
				m.finish()
				m.pass()
			}()
			return false
		}
	}
	m.pass()
	return waits
}

// dismiss makes the leader leave if its context has ended. attend polls with it: watching each
// context would cost each call more than all the rest of the mux does.
func (m *mux) dismiss() {
	m.mu.Lock()
	leader := m.leader
	var ctx context.Context
	if leader != nil {
		ctx = leader.ctx
	}
	m.mu.Unlock()
	if leader == nil || leader.why(ctx) == nil { // outside m.mu: Err may run callers' code
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leader == leader {
		m.leader, m.leaves = nil, true
		if m.conn != nil {
			m.conn.interrupt()
		}
	}
}

// dismissAll makes all callers leave that must not wait any longer: those of queued calls
// here, those of calls in flight by their leader. They do not listen to the end of the Locker, a
// channel for which all callers would contend.
func (m *mux) dismissAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closing = true
	m.dismissLocked(m.queue)
	if m.led && !m.idle && m.conn != nil {
		m.conn.interrupt()
	}
}

func (m *mux) dismissLocked(calls []*call) {
	if !m.closing {
		return
	}
	for _, c := range calls {
		if c.dismissed() {
			c.leave()
		}
	}
}

// pass hands the lead, and the round trip in flight, to the caller that has waited longest.
func (m *mux) pass() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leader, m.leaves = nil, false
	switch {
	case len(m.queue) > 0 && m.conn == nil:
		go m.reconnect()
	case len(m.batch) > 0 || len(m.queue) > 0:
		if !m.passToLocked(m.batch) && !m.passToLocked(m.queue) {
			go m.lead(nil) // no caller waits for these calls
		}
	case m.closed && m.conn != nil:
		go func() {
			m.end(lockerr.ErrClosed)
			m.pass()
		}()
	default:
		m.led = false
		if m.closed {
			m.farewell.Do(func() { close(m.gone) })
		}
	}
}

// passToLocked makes the first caller that waits for one of the calls the leader.
func (m *mux) passToLocked(calls []*call) bool {
	for _, c := range calls {
		if c.state.CompareAndSwap(callQueued, callLeads) {
			m.leader = c
			c.wake <- struct{}{}
			return true
		}
	}
	return false
}

// reconnect leads until there is a connection, or the queued calls have failed.
func (m *mux) reconnect() {
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	var conn *session
	err := lockerr.ErrClosed
	if !closed {
		conn, err = m.connect(m.connecting)
	}
	m.mu.Lock()
	var failed []*call
	if err == nil {
		m.conn = conn
	} else {
		failed, m.queue = m.queue, nil
	}
	m.mu.Unlock()
	for _, c := range failed {
		c.settle(err, m.now())
	}
	if err == nil {
		m.sent, m.confirmed = conn.made, conn.made
		go m.attend(conn)
	}
	m.pass()
}

// attend reads and pings while there are no calls, and dismisses leaders.
func (m *mux) attend(conn *session) {
	sleep := linger
	for seen := 0; ; {
		time.Sleep(sleep)
		m.mu.Lock()
		if m.conn != conn {
			m.mu.Unlock()
			return
		}
		flows := m.sends != seen
		seen = m.sends
		sleep = nextLinger(sleep, flows)
		if m.led || !quietFor(flows, m.clock()-m.sent) {
			m.mu.Unlock()
			m.dismiss()
			continue
		}
		m.led, m.idle = true, true
		rest := time.Duration(0)
		if m.ttl > 0 {
			rest = max(m.sent+m.ttl/3-m.clock(), time.Millisecond)
		}
		conn.readFor(rest)
		m.mu.Unlock()

		err := conn.listen()

		m.mu.Lock()
		wanted := !m.idle
		m.idle = false
		if isTimeout(err) && !wanted {
			ping := &call{bound: true}
			ping.state.Store(callLeft)
			m.queue = append(m.queue, ping)
		}
		m.mu.Unlock()
		switch {
		case !isTimeout(err):
			m.end(err)
			m.pass()
		case wanted:
			m.pass()
		default:
			go m.lead(nil) // not here: callers may join it, and then the look at leaders goes on
		}
	}
}

// begin sends the next batch, if there are calls. An error ends the session.
func (m *mux) begin() error {
	m.mu.Lock()
	conn := m.conn
	if conn != nil {
		m.takeLocked()
	}
	if len(m.batch) > 0 {
		m.sends++
	}
	m.mu.Unlock()
	if len(m.batch) == 0 {
		return nil
	}
	sent := m.clock()
	if m.ttl > 0 && sent >= m.sent+m.ttl-m.margin {
		return errSilentTooLong
	}
	for _, c := range m.batch {
		c.sent = sent
	}
	conn.write(&m.message, m.batch)
	return conn.send(&m.message)
}

// takeLocked moves the next batch out of the queue: at most batcher.MaxRequests requests, unless
// one call has more. Calls whose callers have left are sent as well: a later caller may wait for
// the answer to the same request.
func (m *mux) takeLocked() {
	asked, n := 0, 0
	for _, c := range m.queue {
		if len(m.batch) > 0 && (asked+len(c.asks) > batcher.MaxRequests || c.alone || m.batch[0].alone) {
			break
		}
		n++
		asked += len(c.asks)
		m.batch = append(m.batch, c)
	}
	rest := copy(m.queue, m.queue[n:])
	clear(m.queue[rest:])
	m.queue = m.queue[:rest]
}

// queued returns how many calls were not sent yet.
func (m *mux) queued() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.queue)
}

// finish receives the answer to a batch. It returns false if the leader's context ends before.
func (m *mux) finish() bool {
	conn := m.conn
	m.spinning.wait(&m.gathering, m.message.asked, conn.readable)
	for {
		m.mu.Lock()
		left := m.leaves
		m.leaves = false
		m.dismissLocked(m.batch)
		m.mu.Unlock()
		if left {
			return false
		}
		err := conn.receive(&m.message)
		if err == nil {
			m.answered()
			return true
		}
		if isTimeout(err) {
			m.mu.Lock()
			over := conn.resume()
			m.mu.Unlock()
			if !over {
				continue
			}
			err = lockerr.ErrNoAnswer
		}
		m.end(err)
		return true
	}
}

// answered settles the calls of a batch after its answer.
func (m *mux) answered() {
	failed, ended := m.message.verdict()
	if ended != nil {
		m.end(ended)
		return
	}
	if failed != nil && m.batch[0].undo {
		m.end(failed) // then the server releases what was to be undone
		return
	}
	m.sent = m.batch[0].sent
	if failed != nil {
		m.undo()
	}
	done := m.roundTrip
	m.roundTrip = m.spare
	now := m.now()
	m.gathering.Answered(len(done.batch), m.queued(), now.clock-m.sent)
	var broken error
	if failed == nil && m.gathering.Enough(m.queued()) { // otherwise the calls of undo come first
		// The socket's buffer is empty. So only a message that is larger than the buffer, one
		// of AcquireAll, can block here on a dead network while received answers wait.
		broken = m.begin()
		now = m.now()
	}
	answers := done.message.answers
	for _, c := range done.batch {
		if failed == nil {
			c.answers = append(c.one[:0], answers[:len(c.asks)]...) // the message is used again
			answers = answers[len(c.asks):]
			if c.query != nil {
				c.query.rows = done.message.rows
			}
		}
		c.settle(failed, now)
	}
	clear(done.batch)
	m.spare = roundTrip{done.message, done.batch[:0]}
	if m.ttl > 0 && m.sent-m.confirmed >= m.ttl/4 {
		m.confirmed = m.sent
		m.alive(m.sent)
	}
	if broken != nil {
		m.end(broken) // after the calls that were answered are settled: it ends their locks
	}
}

// undo releases, before any other request, what a failed statement may have acquired and what
// it was to release: advisory locks outlive the statement. Then each call but releases and
// queries is sent once more, alone: the statement may have been cancelled, or the request of
// another call in the batch may have been too much for the server.
func (m *mux) undo() {
	c := &call{undo: true, alone: true, bound: true}
	c.state.Store(callLeft)
	var again []*call
	settled := m.batch[:0]
	for _, failed := range m.batch {
		for _, a := range failed.asks {
			c.asks = append(c.asks, a.undone())
		}
		if failed.query == nil && !failed.releases() && !failed.retried {
			failed.retried, failed.alone = true, true
			again = append(again, failed)
		} else {
			settled = append(settled, failed)
		}
	}
	m.batch = settled
	if len(c.asks) > 0 {
		again = slices.Insert(again, 0, c)
	}
	m.mu.Lock()
	m.queue = slices.Insert(m.queue, 0, again...)
	m.dismissLocked(m.queue)
	m.mu.Unlock()
}

// timeLocked makes a brief call that is queued leave after a while, if there is no connection.
func (m *mux) timeLocked(c *call) {
	if !c.brief || m.conn != nil {
		return
	}
	c.queued = m.clock()
	if m.brief == nil {
		m.brief = time.AfterFunc(dbconn.Timeout, m.leaveBrief)
	}
}

// leaveBrief makes the brief calls leave that have waited for a connection for long enough, and
// comes back for the others.
func (m *mux) leaveBrief() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.brief = nil
	if m.conn != nil {
		return
	}
	for _, c := range m.queue {
		if !c.brief {
			continue
		}
		left := dbconn.Timeout - (m.clock() - c.queued)
		if left <= 0 && c.state.Load() == callLeads { // it is about to wait for the connection
			left = linger
		}
		if left > 0 {
			m.brief = time.AfterFunc(left, m.leaveBrief)
			return
		}
		c.late.Store(true)
		c.leave()
	}
}

// now reads both clocks.
func (m *mux) now() instant { return instant{m.clock(), time.Now()} }

// expectWake gives a call a channel to wait on.
func (m *mux) expectWake(c *call) {
	if c.wake != nil {
		return
	}
	if wake, ok := m.wakes.Get().(chan struct{}); ok {
		c.wake = wake
	} else {
		c.wake = make(chan struct{}, 1)
	}
}

// forget ends the wait for a call: nothing reads its context any more, and an entry that
// lasts as long as a lock may contain the call.
func (m *mux) forget(c *call) {
	c.ctx = nil
	if c.wake != nil {
		m.wakes.Put(c.wake)
		c.wake = nil
	}
}

// close ends the connection after the calls in flight, and waits for that until ctx ends.
func (m *mux) close(ctx context.Context) error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.stop()
	m.rouseLocked()
	m.mu.Unlock()
	select {
	case <-m.gone:
		return nil
	case <-ctx.Done():
		return lockerr.ContextError(ctx)
	}
}

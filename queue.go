package pgxlock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A line of this process has its position among the lines of other processes by a ticket in
// the table pgxlock_waiters. Only a line that does not get its lock at once has a ticket. A
// release checks the tickets after its commit, and wakes the first.
//
// Both sides commit first and check then: a line publishes its ticket before its first waiter
// tries once more, and a release commits before it checks the tickets. So one of the two sees
// the other. Some releases wake no ticket: a holder died, its lease expired, or it called
// release_lock() itself. A check of all tickets about every second notices these.

// How long a ticket counts without being refreshed. The longer time is for a process that
// listens: the advisory lock of its listener's session shows whether it is alive.
const (
	ticketLife        = 15 * time.Second
	ticketLifeUnheard = 3 * time.Second
)

// maxTickets is how many tickets one statement handles at most.
const maxTickets = hold.MaxTickets

// A queue is the tickets of one Locker.
type queue struct {
	lines    *lines
	owner    string
	place    *dbconn.Installation
	log      *slog.Logger
	closing  <-chan struct{} // closed when callers of the Locker wait no longer
	runner   runner
	session  lockSession // nil: there is none
	leaders  leaders
	listener *listener

	publishing  batcher.Batcher[lockkey.Name] // of the line; it has each name once: those in queued
	withdrawing batcher.Batcher[*ticket]
	waking      batcher.Batcher[wakeUp]
	asking      batcher.Batcher[lockkey.Name] // advisory locks whose holders are notified
	trying      batcher.Batcher[*ticket]      // tickets whose tries were refused
	checking    batcher.Batcher[*ticketCheck] // for tries that want to share

	// lines.mu guards what follows.
	tickets map[*ticket]struct{}
	handed  map[lockkey.Name]struct{} // advisory locks that callers here handed over since checked
	checked time.Time
	sending map[lockkey.Name]struct{}  // of tickets in flight, whose new numbers are not known yet
	leaving map[int64]struct{}         // numbers of tickets that are to be removed from the table
	void    map[lockkey.Name][]*ticket // tickets that are over, until their removal was tried
	others  map[lockkey.Name]time.Time // when other processes were last seen to have an advisory lock, or to wait for it
	forget  int                        // the size of others at which old entries are removed
	queued  map[lockkey.Name]struct{}  // of tickets that are to be published, or refreshed
	woken   map[lockkey.Name]wokenTicket
	client  int64       // the number under which the listener listens; 0: it does not
	timer   *time.Timer // refreshes all tickets
	failing bool        // the last try to publish tickets failed
	closed  bool
}

// A runner runs exchanges on a connection of the Locker.
type runner interface {
	Do(dbconn.Exchange) error

	// Reached reports whether the last one got an answer.
	Reached() bool
}

// A lockSession has the advisory locks of this process.
type lockSession interface {
	// Wanted is called when other processes wait for one of the locks.
	Wanted(name lockkey.Name)

	// Evicted is called when an operator may have evicted the holder of one of them.
	Evicted()

	// Unpublished returns names of locks that operators should see and cannot yet.
	Unpublished() []string
}

// leaders are the leaders of one Locker.
type leaders interface {
	look()     // checks whether any was asked to step down
	any() bool // whether there is one
}

// A ticket is the position of one line in the queue of all processes for its lock.
type ticket struct {
	queue  *queue
	line   *line
	number int64         // 0: not published yet
	sent   int           // how often it was published
	flying bool          // it is in flight
	over   bool          // its line has no waiters any more, or has the lock
	gone   chan struct{} // closed when its removal was tried; nil: no caller waits for that
	unsent bool          // the last try to publish it failed; the next refresh tries again
	first  bool          // no ticket was before it when the server last answered
	vain   int           // how often in a row the lock was refused though no session seemed to hold it
	woken  bool          // its row may be marked as woken
}

func newQueue(l *Locker, place *dbconn.Installation, owner string, runner runner, session lockSession, d dbconn.Dialer) *queue {
	q := &queue{
		lines: &l.lines, owner: owner, place: place, log: l.log, closing: l.calls.Closing().Done(), runner: runner, session: session, leaders: &l.leading,
		tickets: make(map[*ticket]struct{}), queued: make(map[lockkey.Name]struct{}), handed: make(map[lockkey.Name]struct{}), others: make(map[lockkey.Name]time.Time), sending: make(map[lockkey.Name]struct{}), leaving: make(map[int64]struct{}), void: make(map[lockkey.Name][]*ticket),
	}
	l.lines.queue = q
	q.listener = newListener(d, q)
	q.publishing = batcher.Batcher[lockkey.Name]{Limit: maxTickets, Run: q.publish, Fail: q.unsent}
	q.withdrawing = batcher.Batcher[*ticket]{Limit: maxTickets, Run: q.withdraw, Fail: func(batch []*ticket, _ error) { q.withdrawLater(batch) }}
	q.waking = batcher.Batcher[wakeUp]{Limit: maxTickets, Run: q.wake, Fail: func([]wakeUp, error) {}}
	q.asking = batcher.Batcher[lockkey.Name]{Limit: maxTickets, Run: q.tellHolders, Fail: func([]lockkey.Name, error) {}}
	q.trying = batcher.Batcher[*ticket]{Limit: maxTickets, Run: q.tried, Fail: q.untold}
	q.checking = batcher.Batcher[*ticketCheck]{Limit: maxTickets, Run: q.check, Fail: func(batch []*ticketCheck, _ error) { settleChecks(batch, nil) }}
	return q
}

// ticket returns the number of the ticket with which the first waiter tries, 0 if there is
// none, and whether no ticket was before that.
func (p *waiter) ticket() (number int64, first bool) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	t := p.line.ticket
	if t == nil {
		return 0, false
	}
	p.sent = t.sent
	if t.flying {
		p.sent--
	}
	return t.number, t.first
}

// stand makes sure that the line has a ticket. It reports whether the first waiter is then
// woken when its turn comes; otherwise it must poll.
func (q *queue) stand(l *line) (wokenInTurn bool) {
	if !q.place.Installed() {
		return false
	}
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.enterLocked(l)
	return l.ticket.wokenInTurnLocked()
}

// enterLocked makes sure that a line has a ticket.
func (q *queue) enterLocked(l *line) {
	if l.ticket == nil {
		l.ticket = &ticket{queue: q, line: l}
		q.tickets[l.ticket] = struct{}{}
		if len(q.tickets) == 1 && !q.closed {
			q.refreshSoonLocked()
		}
		q.listener.start()
	}
	if l.ticket.number == 0 && !l.ticket.unsent {
		q.addLocked(l.ticket)
	}
}

// wokenInTurnLocked reports whether the line is woken when its turn comes.
func (t *ticket) wokenInTurnLocked() bool { return t.number != 0 && !t.unsent && t.queue.client != 0 }

// addLocked publishes a ticket, or refreshes it. It queues the name of the line: a line that
// had many tickets since the last batch has one entry, and the next batch sends only the
// ticket that the line has by then.
func (q *queue) addLocked(t *ticket) {
	name := t.line.name
	if _, queued := q.queued[name]; !queued {
		q.queued[name] = struct{}{}
		q.publishing.Add(name)
	}
}

// pendingLocked reports whether the ticket is in flight, or is about to be published.
func (t *ticket) pendingLocked() bool {
	_, queued := t.queue.queued[t.line.name]
	return t.flying || queued && !t.unsent
}

// refreshSoonLocked arranges the next refresh.
func (q *queue) refreshSoonLocked() {
	if q.timer == nil {
		q.timer = time.AfterFunc(clock.Jitter(lookEvery), q.refresh)
	} else {
		q.timer.Reset(clock.Jitter(lookEvery))
	}
}

// refresh publishes all tickets again: other processes see that the lines still wait, and the
// answers say which lines should try.
func (q *queue) refresh() {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	for t := range q.tickets {
		q.addLocked(t)
	}
	if len(q.tickets) > 0 && !q.closed {
		q.refreshSoonLocked()
	}
}

// withdrawLocked ends a ticket of a line that has no waiters any more, or that got its lock
// otherwise than with this ticket.
func (t *ticket) withdrawLocked() {
	t.endLocked()
	switch {
	case t.number != 0:
		t.queue.leaveLocked(t)
	case t.flying:
		t.queue.void[t.line.name] = append(t.queue.void[t.line.name], t)
	}
}

// leaveLocked has a ticket removed from the table.
func (q *queue) leaveLocked(t *ticket) {
	q.leaving[t.number] = struct{}{}
	if void := q.void[t.line.name]; !slices.Contains(void, t) {
		q.void[t.line.name] = append(void, t)
	}
	q.withdrawing.Add(t)
}

// leftLocked records that the removal of a ticket was tried.
func (q *queue) leftLocked(t *ticket) {
	if t.flying {
		return // publishing may insert it again; then it is removed again
	}
	void := slices.DeleteFunc(q.void[t.line.name], func(other *ticket) bool { return other == t })
	if q.void[t.line.name] = void; len(void) == 0 {
		delete(q.void, t.line.name)
	}
	if t.gone != nil {
		close(t.gone)
		t.gone = nil
	}
}

// withoutVoid waits until this process's tickets that are over are removed, because a try
// would take them for waiters. It does not wait longer than the wake timeout: a queue that
// fails must not keep callers from a free lock.
func (q *queue) withoutVoid(ctx context.Context, keys []string, name func(key string) lockkey.Name) {
	var gone []chan struct{}
	q.lines.mu.Lock()
	for _, key := range keys {
		if len(q.void) == 0 {
			break
		}
		for _, t := range q.void[name(key)] {
			if t.gone == nil {
				t.gone = make(chan struct{})
			}
			gone = append(gone, t.gone)
		}
	}
	q.lines.mu.Unlock()
	if len(gone) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, turnTime)
	defer cancel()
	for _, gone := range gone {
		select {
		case <-gone:
		case <-ctx.Done():
			return
		case <-q.closing:
			return
		}
	}
}

// spendLocked ends a ticket whose line got the lock after a try with that number. The grant of
// a lease removes the ticket with this number from the table. But if the ticket was sent more
// often than before the try, it may have been inserted again after the grant.
func (t *ticket) spendLocked(number int64, sent int) {
	if number != 0 && number == t.number && sent == t.sent && t.line.name.Kind() == 0 {
		t.endLocked()
	} else {
		t.withdrawLocked()
	}
}

// endLocked ends a ticket that is not in the table any more. If it is in flight, publish
// notices that it is over.
func (t *ticket) endLocked() {
	t.over = true
	t.line.ticket = nil
	delete(t.queue.tickets, t)
}

// publication is the arguments of the statement that publishes tickets.
type publication struct {
	kinds   []int32
	names   []string
	numbers []*int64
	waiters []int32
	holds   []*string
	client  *int64
	life    time.Duration
}

func (q *queue) publication(names []lockkey.Name) (batch []*ticket, p publication) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	p.life = ticketLifeUnheard
	if client := q.client; client != 0 {
		p.client, p.life = &client, ticketLife
	}
	for _, name := range names {
		delete(q.queued, name) // a change from now on is sent again
		l := q.lines.of[name]
		if l == nil || l.ticket == nil {
			continue // the ticket is over
		}
		t := l.ticket
		batch = append(batch, t)
		t.flying = true
		q.sending[name] = struct{}{}
		t.sent++
		p.kinds = append(p.kinds, int32(t.line.name.Kind()))
		p.names = append(p.names, t.line.name.Text())
		var number *int64
		if n := t.number; n != 0 {
			number = &n
		}
		p.numbers = append(p.numbers, number)
		p.waiters = append(p.waiters, int32(t.line.places.Len()))
		p.holds = append(p.holds, t.line.holdsLocked())
	}
	return batch, p
}

// holdsLocked returns, as JSON, the locks that the waiters of the line hold meanwhile; nil for
// none.
func (l *line) holdsLocked() *string {
	var ids []string
	for e := l.places.Front(); e != nil; e = e.Next() {
		for _, held := range e.Value.(*waiter).holds {
			ids = append(ids, held.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	quoted, err := json.Marshal(ids)
	if err != nil {
		return nil
	}
	text := string(quoted)
	return &text
}

// publish sends the tickets of a batch of lines, new and old ones.
func (q *queue) publish(names []lockkey.Name) error {
	type row struct {
		Ticket   int64
		Ask      bool
		Deadlock *string
	}
	var rows []row
	batch, p := q.publication(names)
	if len(batch) == 0 {
		return nil
	}
	err := q.runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.QueuePublish),
			p.kinds, p.names, p.numbers, p.waiters, p.holds, p.client, q.owner, p.life.Milliseconds()), pgx.RowToStructByPos[row])
		return err
	})
	if err == nil && len(rows) != len(batch) {
		err = fmt.Errorf("%d answers for %d tickets", len(rows), len(batch))
	}
	if err != nil {
		q.failed(batch, err)
		if q.runner.Reached() {
			return nil
		}
		return err
	}
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.failing = false
	clear(q.sending)
	for i, t := range batch {
		isNew := t.number == 0
		t.number, t.first, t.flying, t.unsent = rows[i].Ticket, rows[i].Ask, false, false
		switch {
		case t.over:
			q.leaveLocked(t)
		case rows[i].Deadlock != nil:
			t.line.failLocked(*rows[i].Deadlock)
		case isNew && !t.line.owned && t.line.name.Kind() == 0, rows[i].Ask:
			t.line.wakeLocked() // a line with a new ticket tries for a lease after the commit, whatever its last try saw
		}
	}
	return nil
}

// unsent records tickets that were not sent because the server cannot be reached.
func (q *queue) unsent(names []lockkey.Name, err error) {
	q.lines.mu.Lock()
	var batch []*ticket
	for _, name := range names {
		delete(q.queued, name)
		if l := q.lines.of[name]; l != nil && l.ticket != nil {
			batch = append(batch, l.ticket)
		}
	}
	q.lines.mu.Unlock()
	q.failed(batch, err)
}

// failed records tickets that could not be published. Their lines poll for the lock, and the
// next refresh publishes the tickets.
func (q *queue) failed(batch []*ticket, err error) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	if !q.failing && !errors.Is(err, ErrClosed) {
		q.log.Warn("pgxlock: waiting without a ticket in the queue", "locks", len(batch), "error", err)
	}
	q.failing = true
	clear(q.sending)
	for _, t := range batch {
		t.flying = false
		switch {
		case t.over && t.number != 0: // the outcome may be unknown
			q.leaveLocked(t)
		case t.over:
			q.leftLocked(t)
		default:
			t.unsent = true
			t.line.wakeLocked() // from now on it has to poll
		}
	}
}

// failLocked ends the wait of the caller whose held lock, the one with this id, closes a
// deadlock.
func (l *line) failLocked(id string) {
	for e := l.places.Front(); e != nil; e = e.Next() {
		p := e.Value.(*waiter)
		for _, held := range p.holds {
			if held.id == id && p.fate == nil {
				p.fate = fmt.Errorf("%w: the holder of the lock waits, directly or through others, for %s, which the caller holds", ErrDeadlock, lockkey.Shown(held.key))
				p.signal()
				return
			}
		}
	}
}

// ticketsOfLocked returns the columns by which the table identifies tickets.
func ticketsOfLocked(batch []*ticket) (kinds []int32, names []string, numbers []int64) {
	for _, t := range batch {
		kinds, names, numbers = append(kinds, int32(t.line.name.Kind())), append(names, t.line.name.Text()), append(numbers, t.number)
	}
	return kinds, names, numbers
}

// withdraw removes tickets, and wakes the waiters behind them. It does so even if the line got
// its lock: the line may have released the lock before the ticket was inserted, and that
// release could not wake a waiter behind it.
func (q *queue) withdraw(batch []*ticket) error {
	var wakeUps []wakeUp
	q.lines.mu.Lock()
	kinds, names, numbers := ticketsOfLocked(batch)
	for _, t := range batch {
		wakeUps = append(wakeUps, wakeUp{name: t.line.name})
	}
	q.lines.mu.Unlock()
	err := q.send(statements.QueueWithdraw, kinds, names, numbers)
	if err == nil {
		q.lines.mu.Lock()
		for _, t := range batch {
			delete(q.leaving, t.number)
			q.leftLocked(t)
		}
		q.lines.mu.Unlock()
		q.waking.Add(wakeUps...)
		return nil
	}
	q.withdrawLater(batch)
	if q.runner.Reached() {
		return nil
	}
	return err
}

// withdrawLater tries again later. Tickets that are never removed expire.
func (q *queue) withdrawLater(batch []*ticket) {
	q.lines.mu.Lock()
	for _, t := range batch {
		q.leftLocked(t)
	}
	q.lines.mu.Unlock()
	time.AfterFunc(clock.Jitter(lookEvery), func() {
		q.lines.mu.Lock()
		defer q.lines.mu.Unlock()
		if !q.closed {
			q.withdrawing.Add(batch...)
		}
	})
}

// listens records the number under which the listener receives notifications from now on, 0
// if it receives none, and publishes it with the tickets.
func (q *queue) listens(client int64) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.client = client
	for t := range q.tickets {
		t.woken = true // it may have been woken while the listener was away
		q.addLocked(t)
	}
}

// Listen implements [hold.Queue].
func (q *queue) Listen(pid int32) { q.listener.listenFor(pid) }

// listening reports whether the listener receives notifications.
func (q *queue) listening() bool {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	return q.client != 0
}

// needsListener reports whether anything in this process waits for a notification.
func (q *queue) needsListener() bool {
	q.lines.mu.Lock()
	tickets := len(q.tickets)
	q.lines.mu.Unlock()
	return tickets > 0 || q.leaders.any()
}

// Reap removes tickets of processes that died, of locks that no other process tried for since.
func (q *queue) Reap() error { return q.send(statements.QueueReap) }

// send runs a statement without a result.
func (q *queue) send(statement statements.Name, args ...any) error {
	return q.runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) error {
		rows := c.Query(ctx, q.place.Statement(statement), args...)
		rows.Close()
		return rows.Err()
	})
}

// Close ends the traffic. The last waiter must have gone.
func (q *queue) Close() {
	q.lines.mu.Lock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.lines.mu.Unlock()
	<-q.publishing.Done()
	<-q.withdrawing.Done()
	<-q.asking.Done()
	<-q.trying.Done()
	<-q.checking.Done()
	<-q.waking.Done()
	q.listener.stop()
}

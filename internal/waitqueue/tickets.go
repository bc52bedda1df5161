package waitqueue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A ticket is the position of one local queue in the queue of all processes for its lock: a
// row of the table pgxlock_waiters. Only a local queue that does not get its lock at once has
// one. A release checks the tickets after its commit, and wakes the first.
//
// Both sides commit first and check then: a local queue publishes its ticket before its first
// waiter tries once more, and a release commits before it checks the tickets. So one of the
// two sees the other. The waiter of an advisory lock tries only if its ticket is the first, which
// it learns in the statement that publishes it: [Queue.foundNobodyLocked] is for that. Some releases
// wake no ticket: a holder died, its lease expired, or it called release_lock() itself. A check of
// all tickets about every second notices these.
type ticket struct {
	queue    *Queue
	local    *localQueue
	number   int64         // 0: not published yet
	sent     int           // how often it was published
	inFlight bool          // it was sent, and the answer has not arrived
	over     bool          // its local queue has no waiters any more, or has the lock
	gone     chan struct{} // closed when its removal was tried; nil: no caller waits for that
	unsent   bool          // the last try to publish it failed; the next refresh tries again
	first    bool          // no ticket was before it when the server last answered
	unheld   int           // how often in a row the lock was refused though no session seemed to hold it
	woken    bool          // its row may be marked as woken
	behind   int64         // the ticket ahead of it although the lock may be free; 0: none
	since    int           // how many further answers said so
}

// Protocol is the number of what Lockers and the functions of the queue expect of each other, in
// tickets and in payloads. docs/design.md says what a later one may change.
const Protocol = 1

// How long a ticket counts without being refreshed. The longer time is for a process that
// listens: the advisory lock of its listener's session shows whether it is alive.
const (
	ticketLife        = 15 * time.Second
	ticketLifeUnheard = 3 * time.Second
)

// ticketLocked returns the number of the ticket with which the first waiter tries, 0 if there is
// none, and whether no ticket was before that.
func (p *position) ticketLocked() (number int64, first bool) {
	t := p.local.ticket
	if t == nil {
		return 0, false
	}
	p.sent = t.sent
	if t.inFlight {
		p.sent--
	}
	return t.number, t.first
}

// enter makes sure that the local queue has a ticket. It reports whether the first waiter is
// then woken when its turn comes; otherwise it must poll.
func (q *Queue) enter(l *localQueue) (wokenInTurn bool) {
	if !q.installed() {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.enterLocked(l)
	return l.ticket.wokenInTurnLocked()
}

// enterLocked makes sure that a local queue has a ticket.
func (q *Queue) enterLocked(l *localQueue) {
	if l.ticket == nil {
		l.ticket = &ticket{queue: q, local: l}
		q.tickets[l.ticket] = struct{}{}
		if len(q.tickets) == 1 && !q.closed {
			q.refreshSoonLocked()
		}
		q.listener.start()
	}
	if l.ticket.number == 0 && !l.ticket.unsent && !l.ticket.inFlight {
		q.addLocked(l.ticket)
	}
}

// publishedLocked reports whether the ticket is in the table, as far as is known.
func (t *ticket) publishedLocked() bool { return t.number != 0 && !t.unsent }

// wokenInTurnLocked reports whether the local queue is woken when its turn comes.
func (t *ticket) wokenInTurnLocked() bool { return t.publishedLocked() && t.queue.Listening() }

// addLocked publishes a ticket, or refreshes it. It queues the name of the lock: a local queue
// that had many tickets since the last batch has one entry, and the next batch sends only the
// ticket that the local queue has by then.
func (q *Queue) addLocked(t *ticket) {
	name := t.local.name
	if _, queued := q.queued[name]; !queued {
		q.queued[name] = struct{}{}
		q.publishing.Add(name)
	}
}

// pendingLocked reports whether the ticket is in flight, or is about to be published.
func (t *ticket) pendingLocked() bool {
	_, queued := t.queue.queued[t.local.name]
	return t.inFlight || queued && !t.unsent
}

// refreshSoonLocked arranges the next refresh.
func (q *Queue) refreshSoonLocked() {
	if q.timer == nil {
		q.timer = time.AfterFunc(clock.Jitter(clock.CheckInterval), q.refresh)
	} else {
		q.timer.Reset(clock.Jitter(clock.CheckInterval))
	}
}

// refresh publishes all tickets again: other processes see that the local queues still wait,
// and the answers say which local queues should try.
func (q *Queue) refresh() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for t := range q.tickets {
		q.addLocked(t)
	}
	if len(q.tickets) > 0 && !q.closed {
		q.refreshSoonLocked()
	}
}

// withdrawLocked ends a ticket of a local queue that has no waiters any more, or that got its
// lock otherwise than with this ticket.
func (t *ticket) withdrawLocked() {
	t.endLocked()
	switch {
	case t.number != 0:
		t.queue.leaveLocked(t)
	case t.inFlight:
		t.queue.void[t.local.name] = append(t.queue.void[t.local.name], t)
	}
}

// leaveLocked has a ticket removed from the table.
func (q *Queue) leaveLocked(t *ticket) {
	q.leaving[t.number] = struct{}{}
	if void := q.void[t.local.name]; !slices.Contains(void, t) {
		q.void[t.local.name] = append(void, t)
	}
	q.removeLocked(t)
}

// removeLocked has the table's row of a ticket removed, and then the next waiter woken.
func (q *Queue) removeLocked(tickets ...*ticket) {
	for _, t := range tickets {
		q.removing[t.local.name]++
	}
	q.withdrawing.Add(tickets...)
}

// removedLocked records that the removal of tickets was tried, and returns the names of their locks,
// whose next waiters are to be woken.
func (q *Queue) removedLocked(tickets []*ticket) (names []lockkey.Name) {
	for _, t := range tickets {
		name := t.local.name
		names = append(names, name)
		if q.removing[name]--; q.removing[name] == 0 {
			delete(q.removing, name)
		}
		q.leftLocked(t)
	}
	return names
}

// leftLocked records that the removal of a ticket was tried.
func (q *Queue) leftLocked(t *ticket) {
	if t.inFlight {
		return // publishing may insert it again; then it is removed again
	}
	void := slices.DeleteFunc(q.void[t.local.name], func(other *ticket) bool { return other == t })
	if q.void[t.local.name] = void; len(void) == 0 {
		delete(q.void, t.local.name)
	}
	if t.gone != nil {
		close(t.gone)
		t.gone = nil
	}
}

// withoutVoid waits until this process's tickets that are over are removed, because a try
// would take them for waiters. It does not wait longer than the wake timeout: a queue that
// fails must not keep callers from a free lock.
func (q *Queue) withoutVoid(ctx context.Context, names []lockkey.Name) {
	var gone []chan struct{}
	q.mu.Lock()
	for _, name := range names {
		if len(q.void) == 0 {
			break
		}
		for _, t := range q.void[name] {
			if t.gone == nil {
				t.gone = make(chan struct{})
			}
			gone = append(gone, t.gone)
		}
	}
	q.mu.Unlock()
	if len(gone) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, clock.WakeTimeout)
	defer cancel()
	for _, gone := range gone {
		select {
		case <-gone:
		case <-ctx.Done():
			return
		case <-q.config.Closing.Done():
			return
		}
	}
}

// spendLocked ends a ticket whose local queue got the lock after a try with that number. The
// grant of a lease removes the ticket with this number from the table. But if the ticket was
// sent more often than before the try, it may have been inserted again after the grant.
func (t *ticket) spendLocked(number int64, sent int) {
	if number != 0 && number == t.number && sent == t.sent && t.local.name.Kind() == 0 {
		t.endLocked()
	} else {
		t.withdrawLocked()
	}
}

// endLocked ends a ticket that is not in the table any more. If it is in flight, publish
// notices that it is over.
func (t *ticket) endLocked() {
	t.over = true
	t.local.ticket = nil
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

func (q *Queue) publication(names []lockkey.Name) (batch []*ticket, p publication) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p.life = ticketLifeUnheard
	if client := q.client.Load(); client != 0 {
		p.client, p.life = &client, ticketLife
	}
	for _, name := range names {
		delete(q.queued, name) // a change from now on is sent again
		l := q.locals[name]
		if l == nil || l.ticket == nil {
			continue // the ticket is over
		}
		t := l.ticket
		batch = append(batch, t)
		t.inFlight = true
		q.sending[name] = struct{}{}
		t.sent++
		p.kinds = append(p.kinds, int32(t.local.name.Kind()))
		p.names = append(p.names, t.local.name.Text())
		var number *int64
		if n := t.number; n != 0 {
			number = &n
		}
		p.numbers = append(p.numbers, number)
		p.waiters = append(p.waiters, int32(t.local.waiters.Len()))
		p.holds = append(p.holds, t.local.holdsLocked())
	}
	return batch, p
}

// publish sends the tickets of a batch of local queues, new and old ones.
func (q *Queue) publish(names []lockkey.Name) error {
	type row struct {
		Ticket   int64
		Ask      bool
		Deadlock *string
		Behind   *int64
	}
	var rows []row
	batch, p := q.publication(names)
	if len(batch) == 0 {
		return nil
	}
	err := q.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.Query(ctx, q.server.Place.Statement(statements.QueuePublish),
			p.kinds, p.names, p.numbers, p.waiters, p.holds, p.client, q.server.Owner, p.life.Milliseconds(), Protocol), pgx.RowToStructByPos[row])
		return err
	})
	if err == nil && len(rows) != len(batch) {
		err = fmt.Errorf("%d answers for %d tickets", len(rows), len(batch))
	}
	if err != nil {
		q.failed(batch, err)
		if q.server.Runner.Reached() {
			return nil
		}
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failing = false
	clear(q.sending)
	for i, t := range batch {
		isNew := t.number != rows[i].Ticket // also where the server has replaced the number
		t.number, t.first, t.inFlight, t.unsent = rows[i].Ticket, rows[i].Ask, false, false
		switch {
		case t.over:
			q.leaveLocked(t)
		case rows[i].Deadlock != nil:
			t.local.failLocked(*rows[i].Deadlock)
		case isNew && !t.local.owned && t.local.name.Kind() == 0, rows[i].Ask:
			t.local.wakeLocked() // a local queue with a new ticket tries for a lease after the commit, whatever its last try saw
		default:
			t.passLocked(rows[i].Behind)
		}
	}
	return nil
}

// passLocked wakes the waiter ahead if the lock may be free and no release has woken that
// waiter, so that this one passes it after the wake timeout: no holder may be left to do so.
// Of a lease the server knows that it is free; of others it says so always, and checks when
// it wakes.
func (t *ticket) passLocked(behind *int64) {
	if behind == nil || *behind != t.behind {
		t.behind, t.since = 0, 0
		if behind != nil {
			t.behind = *behind
		}
		return
	}
	patience := 1
	if t.local.name.Kind() != 0 || t.local.name.IsSemaphore() {
		patience = 5
	}
	if t.since++; t.since%patience == 0 {
		t.queue.waking.Add(wakeUp{name: t.local.name, number: t.behind})
	}
}

// unsent records tickets that were not sent because the server cannot be reached.
func (q *Queue) unsent(names []lockkey.Name, err error) {
	q.mu.Lock()
	var batch []*ticket
	for _, name := range names {
		delete(q.queued, name)
		if l := q.locals[name]; l != nil && l.ticket != nil {
			batch = append(batch, l.ticket)
		}
	}
	q.mu.Unlock()
	q.failed(batch, err)
}

// failed records tickets that could not be published. Their local queues poll for the lock, and
// the next refresh publishes the tickets.
func (q *Queue) failed(batch []*ticket, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.failing && !errors.Is(err, lockerr.ErrClosed) {
		q.config.Log.Warn("pgxlock: waiting without a ticket in the queue", "locks", len(batch), "error", err)
	}
	q.failing = true
	clear(q.sending)
	for _, t := range batch {
		t.inFlight = false
		switch {
		case t.over && t.number != 0: // the outcome may be unknown
			q.leaveLocked(t)
		case t.over:
			q.leftLocked(t)
		default:
			t.unsent = true
			t.local.wakeLocked() // from now on it has to poll
		}
	}
}

// ticketsOfLocked returns the columns by which the table identifies tickets.
func ticketsOfLocked(batch []*ticket) (kinds []int32, names []string, numbers []int64) {
	for _, t := range batch {
		kinds, names, numbers = append(kinds, int32(t.local.name.Kind())), append(names, t.local.name.Text()), append(numbers, t.number)
	}
	return kinds, names, numbers
}

// withdraw removes tickets, and wakes the waiters behind them. It does so even if the local
// queue got its lock and has released it: that may have been before the ticket was inserted, and
// then that release could not wake a waiter behind it.
func (q *Queue) withdraw(batch []*ticket) error {
	q.mu.Lock()
	kinds, names, numbers := ticketsOfLocked(batch)
	q.mu.Unlock()
	err := q.send(statements.QueueWithdraw, kinds, names, numbers)
	if err == nil {
		q.mu.Lock()
		for _, t := range batch {
			delete(q.leaving, t.number)
		}
		freed := q.removedLocked(batch)
		q.mu.Unlock()
		q.waking.Add(forFirst(slices.DeleteFunc(freed, func(name lockkey.Name) bool {
			return name.Kind() != 0 && (q.handsOver(name) || q.server.Session != nil && q.server.Session.WakesOnRelease(name.ID))
		}))...)
		return nil
	}
	q.withdrawLater(batch)
	if q.server.Runner.Reached() {
		return nil
	}
	return err
}

// withdrawLater tries again later. Tickets that are never removed expire.
func (q *Queue) withdrawLater(batch []*ticket) {
	q.mu.Lock()
	names := q.removedLocked(batch)
	q.mu.Unlock()
	q.waking.Add(forFirst(names)...) // a release may have left that to the removal
	time.AfterFunc(clock.Jitter(clock.CheckInterval), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if !q.closed {
			q.removeLocked(batch...)
		}
	})
}

// listens records the number under which the listener receives notifications from now on, 0
// if it receives none, and publishes it with the tickets.
func (q *Queue) listens(client int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.client.Store(client)
	for t := range q.tickets {
		t.woken = true // it may have been woken while the listener was away
		q.addLocked(t)
	}
}

// needsListener reports whether anything in this process waits for a notification.
func (q *Queue) needsListener() bool {
	q.mu.Lock()
	tickets := len(q.tickets)
	q.mu.Unlock()
	return tickets > 0 || q.server.Leaders.Any()
}

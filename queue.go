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
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A line of this process has its position among those of other processes by a ticket in the
// table pgxlock_waiters. Only a line that does not get its lock at once has one. A release
// checks the tickets after its commit, and wakes the first.
//
// Both sides commit first and check then: a line publishes its ticket before it asks once
// more, and a release commits before it checks the tickets. So one of the two sees the other.
// Whatever no process announces, because a holder died or its lease expired or it calls
// release_lock() itself, is found by a check of all tickets now and then.

// How long a ticket counts without being refreshed: of a process that listens its
// listener's session tells whether it lives.
const (
	ticketLife        = 15 * time.Second
	ticketLifeUnheard = 3 * time.Second
)

// maxTickets bounds a statement on tickets.
const maxTickets = 1000

// A queue is the tickets of one Locker.
type queue struct {
	lines    *lines // whose mutex guards what is below
	owner    string
	place    *dbconn.Installation
	log      *slog.Logger
	wanted   func(lockkey.Name)          // is told that others wait for an advisory lock of this process
	evicted  func()                      // is told that advisory locks of this process were asked for
	names    func() []string             // those of advisory locks that others shall know
	stepDown func()                      // is told that leaders were asked to step down
	leads    func() bool                 // whether there is a leader here
	run      func(dbconn.Exchange) error // on a connection of the Locker
	reached  func() bool                 // whether the last one got an answer
	listener *listener

	publishing  batcher.Batcher[lockkey.Name] // each once: queued has those that stand there
	withdrawing batcher.Batcher[*ticket]
	waking      batcher.Batcher[wakeUp]
	asking      batcher.Batcher[lockkey.Name] // who has them
	trying      batcher.Batcher[*ticket]      // whose tries were refused
	checking    batcher.Batcher[*ticketCheck] // before a try shares them

	tickets map[*ticket]struct{}
	handed  map[lockkey.Name]struct{} // advisory locks that callers here handed over since checked
	checked time.Time
	sending map[lockkey.Name]struct{}  // whose tickets are being published, so that their numbers are not known
	leaving map[int64]struct{}         // numbers of tickets that are to be removed from the table
	void    map[lockkey.Name][]*ticket // that are over, and whose removal from there is not tried yet
	others  map[lockkey.Name]time.Time // when others were last seen to have an advisory lock, or to wait for it
	forget  int                        // at how many of them the old ones are removed
	queued  map[lockkey.Name]struct{}  // whose tickets are to be published, or refreshed
	woken   map[lockkey.Name]wokenTicket
	client  int64       // what the listener listens as; 0: it does not
	timer   *time.Timer // looks at all tickets
	failing bool        // tickets could not be published when that was last tried
	closed  bool
}

// A ticket is one line's.
type ticket struct {
	queue  *queue
	line   *line
	number int64         // 0: not published yet
	sent   int           // how often it was
	flying bool          // it is just now
	over   bool          // its line has gone, or has the lock
	gone   chan struct{} // closed when its removal was tried; nil: nobody waits for that
	unsent bool          // the last try to publish it failed; the next look at all tickets is another
	first  bool          // nobody stood before it when that was last heard of
	vain   int           // how often in a row its line was refused a lock that nobody seemed to have
	woken  bool          // it may have a stamp in the table that says so
}

func newQueue(l *Locker, place *dbconn.Installation, owner string, run func(dbconn.Exchange) error, reached func() bool, d dbconn.Dialer) *queue {
	q := &queue{
		lines: &l.lines, owner: owner, place: place, log: l.log, stepDown: l.leading.look, leads: l.leading.any, run: run, reached: reached,
		tickets: make(map[*ticket]struct{}), queued: make(map[lockkey.Name]struct{}), handed: make(map[lockkey.Name]struct{}), others: make(map[lockkey.Name]time.Time), sending: make(map[lockkey.Name]struct{}), leaving: make(map[int64]struct{}), void: make(map[lockkey.Name][]*ticket),
	}
	if l.kind == KindAdvisory {
		l.lines.handed = q.handedOver
	}
	q.listener = newListener(d, q)
	q.publishing = batcher.Batcher[lockkey.Name]{Limit: maxTickets, Run: q.publish, Fail: q.unsent}
	q.withdrawing = batcher.Batcher[*ticket]{Limit: maxTickets, Run: q.withdraw, Fail: func(batch []*ticket, _ error) { q.withdrawLater(batch) }}
	q.waking = batcher.Batcher[wakeUp]{Limit: maxTickets, Run: q.wake, Fail: func([]wakeUp, error) {}}
	q.asking = batcher.Batcher[lockkey.Name]{Limit: maxTickets, Run: q.tellHolders, Fail: func([]lockkey.Name, error) {}}
	q.trying = batcher.Batcher[*ticket]{Limit: maxTickets, Run: q.tried, Fail: q.untold}
	q.checking = batcher.Batcher[*ticketCheck]{Limit: maxTickets, Run: q.check, Fail: func(batch []*ticketCheck, _ error) { settleChecks(batch, nil) }}
	return q
}

// ticket returns with which ticket the place in front asks, 0 if it has none, and whether
// nobody stands before that.
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

// stand makes sure that the line has a ticket. It reports whether the one in front
// will be told when to ask; else it had better ask now and then.
func (q *queue) stand(l *line) (told bool) {
	if !q.place.Installed() {
		return false
	}
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.enter(l)
	return l.ticket.told()
}

// enter makes sure that a line has a ticket; lines.mu is held.
func (q *queue) enter(l *line) {
	if l.ticket == nil {
		l.ticket = &ticket{queue: q, line: l}
		q.tickets[l.ticket] = struct{}{}
		if len(q.tickets) == 1 && !q.closed {
			q.refreshSoon()
		}
		q.listener.start()
	}
	if l.ticket.number == 0 && !l.ticket.unsent {
		q.add(l.ticket)
	}
}

// told reports whether the line is woken when its turn has come; lines.mu is held.
func (t *ticket) told() bool { return t.number != 0 && !t.unsent && t.queue.client != 0 }

// add publishes a ticket, or refreshes it; lines.mu is held. Queued is the name of the
// line: one that had many tickets since the last batch has one entry, and only the ticket
// that it has when the next one is made is sent.
func (q *queue) add(t *ticket) {
	name := t.line.name
	if _, queued := q.queued[name]; !queued {
		q.queued[name] = struct{}{}
		q.publishing.Add(name)
	}
}

// pending reports whether the ticket is being published, or is about to be; lines.mu is
// held.
func (t *ticket) pending() bool {
	_, queued := t.queue.queued[t.line.name]
	return t.flying || queued && !t.unsent
}

// refreshSoon arranges the next look at all tickets; lines.mu is held.
func (q *queue) refreshSoon() {
	if q.timer == nil {
		q.timer = time.AfterFunc(clock.Jitter(lookEvery), q.refresh)
	} else {
		q.timer.Reset(clock.Jitter(lookEvery))
	}
}

// refresh looks whether any of the lines should ask, and shows that they still wait.
func (q *queue) refresh() {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	for t := range q.tickets {
		q.add(t)
	}
	if len(q.tickets) > 0 && !q.closed {
		q.refreshSoon()
	}
}

// withdraw ends a ticket of a line that has gone, or got its lock in another way;
// lines.mu is held.
func (t *ticket) withdraw() {
	t.end()
	switch {
	case t.number != 0:
		t.queue.leave(t)
	case t.flying:
		t.queue.void[t.line.name] = append(t.queue.void[t.line.name], t)
	}
}

// leave has a ticket removed from the table; lines.mu is held.
func (q *queue) leave(t *ticket) {
	q.leaving[t.number] = struct{}{}
	if void := q.void[t.line.name]; !slices.Contains(void, t) {
		q.void[t.line.name] = append(void, t)
	}
	q.withdrawing.Add(t)
}

// left is told that the removal of a ticket was tried; lines.mu is held.
func (q *queue) left(t *ticket) {
	if t.flying {
		return // it may come back, and is removed again then
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

// withoutVoid returns when the tickets are removed with which nobody here waits any more:
// to a try they look like waiters. It does not wait long, because a queue that fails
// keeps nobody from a free lock.
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
		}
	}
}

// spend ends a ticket whose line got the lock, for which it asked with that number. If
// it is the ticket's, the grant of a lease has removed it; unless it was sent since it
// had been sent so often, which may have come later. lines.mu is held.
func (t *ticket) spend(number int64, sent int) {
	if number != 0 && number == t.number && sent == t.sent && t.line.name.Kind() == 0 {
		t.end()
	} else {
		t.withdraw()
	}
}

// end ends a ticket that is not in the table any more; lines.mu is held. If it is just
// being published, that will see it.
func (t *ticket) end() {
	t.over = true
	t.line.ticket = nil
	delete(t.queue.tickets, t)
}

// publication is what is sent of tickets.
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
		delete(q.queued, name) // one that is changed from now on is sent again
		l := q.lines.of[name]
		if l == nil || l.ticket == nil {
			continue // it is void
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
		p.holds = append(p.holds, t.line.holds())
	}
	return batch, p
}

// holds is what those who stand in the line hold meanwhile, as JSON; nil for nothing.
// lines.mu is held.
func (l *line) holds() *string {
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

// publish sends the tickets of a batch of lines, new and old.
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
	err := q.run(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.QueuePublish),
			p.kinds, p.names, p.numbers, p.waiters, p.holds, p.client, q.owner, p.life.Milliseconds()), pgx.RowToStructByPos[row])
		return err
	})
	if err == nil && len(rows) != len(batch) {
		err = fmt.Errorf("%d answers for %d tickets", len(rows), len(batch))
	}
	if err != nil {
		q.failed(batch, err)
		if q.reached() {
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
			q.leave(t)
		case rows[i].Deadlock != nil:
			t.line.fail(*rows[i].Deadlock)
		case isNew && !t.line.owned && t.line.name.Kind() == 0, rows[i].Ask:
			t.line.wake() // a new one asks for a lease after the commit, whatever it saw before
		}
	}
	return nil
}

// unsent is told of tickets that were not sent, because the server is away.
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

// failed is told of tickets that could not be published. Their lines ask now and then,
// and try again.
func (q *queue) failed(batch []*ticket, err error) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	if !q.failing && !errors.Is(err, ErrClosed) {
		q.log.Warn("pgxlock: waiting without a place in the queue", "locks", len(batch), "error", err)
	}
	q.failing = true
	clear(q.sending)
	for _, t := range batch {
		t.flying = false
		switch {
		case t.over && t.number != 0: // the outcome may be unknown
			q.leave(t)
		case t.over:
			q.left(t)
		default:
			t.unsent = true
			t.line.wake() // from now on it has to ask
		}
	}
}

// fail ends the wait of one who holds what closes a circle of waits; lines.mu is held.
func (l *line) fail(id string) {
	for e := l.places.Front(); e != nil; e = e.Next() {
		p := e.Value.(*waiter)
		for _, held := range p.holds {
			if held.id == id && p.fate == nil {
				p.fate = fmt.Errorf("%w: who has the lock waits, in the end, for %s, which is held meanwhile", ErrDeadlock, lockkey.Shown(held.key))
				p.signal()
				return
			}
		}
	}
}

// ticketsOf is how the table knows tickets; lines.mu is held.
func ticketsOf(batch []*ticket) (kinds []int32, names []string, numbers []int64) {
	for _, t := range batch {
		kinds, names, numbers = append(kinds, int32(t.line.name.Kind())), append(names, t.line.name.Text()), append(numbers, t.number)
	}
	return kinds, names, numbers
}

// withdraw removes tickets, and wakes the waiters behind them: also where the line got
// its lock, which it may have released before the ticket was there, when nobody behind it
// could be woken.
func (q *queue) withdraw(batch []*ticket) error {
	var wakeUps []wakeUp
	q.lines.mu.Lock()
	kinds, names, numbers := ticketsOf(batch)
	for _, t := range batch {
		wakeUps = append(wakeUps, wakeUp{name: t.line.name})
	}
	q.lines.mu.Unlock()
	err := q.send(statements.QueueWithdraw, kinds, names, numbers)
	if err == nil {
		q.lines.mu.Lock()
		for _, t := range batch {
			delete(q.leaving, t.number)
			q.left(t)
		}
		q.lines.mu.Unlock()
		q.waking.Add(wakeUps...)
		return nil
	}
	q.withdrawLater(batch)
	if q.reached() {
		return nil
	}
	return err
}

// withdrawLater tries again. Until that works they count for as long as they live.
func (q *queue) withdrawLater(batch []*ticket) {
	q.lines.mu.Lock()
	for _, t := range batch {
		q.left(t)
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

// listens says as whom notifications are heard from now on, 0 for not at all; the
// tickets must say so.
func (q *queue) listens(client int64) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.client = client
	for t := range q.tickets {
		t.woken = true // perhaps when nobody listened
		q.add(t)
	}
}

// listening reports whether notifications are heard.
func (q *queue) listening() bool {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	return q.client != 0
}

// needsListener reports whether a notification may come that something here waits for.
func (q *queue) needsListener() bool {
	q.lines.mu.Lock()
	tickets := len(q.tickets)
	q.lines.mu.Unlock()
	return tickets > 0 || q.leads()
}

// reap removes tickets of processes that died, where nobody looked since.
func (q *queue) reap() error { return q.send(statements.QueueReap) }

// send runs a statement that answers nothing.
func (q *queue) send(statement statements.Name, args ...any) error {
	return q.run(func(ctx context.Context, c dbconn.Querier, _ bool) error {
		rows := c.Query(ctx, q.place.Statement(statement), args...)
		rows.Close()
		return rows.Err()
	})
}

// close ends the traffic, when the last line has gone.
func (q *queue) close() {
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

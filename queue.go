package pgxlock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file is where a line of this process stands among those of others: with a
// ticket in the table pgxlock_waiters, which only a line has that does not get its
// lock at once. Who releases looks there after its commit, and wakes the first.
//
// Both sides commit first and look then: a ticket is published before its line asks
// once more, and a lock is given back before the tickets are looked at. So one of
// the two sees the other. What nobody tells, because a holder died or its lease ran
// out or it calls release_lock() itself, is found by a look at all tickets now and
// then.

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
	place    *installation
	log      *slog.Logger
	wanted   func(lockName)       // is told that others wait for an advisory lock of this process
	evicted  func()               // is told that advisory locks of this process were asked for
	names    func() []string      // those of advisory locks that others shall know
	stepDown func()               // is told that leaders were asked to step down
	run      func(exchange) error // on a connection of the Locker
	reached  func() bool          // whether the last one got an answer
	listener *listener

	publishing  combiner[*ticket]
	withdrawing combiner[*ticket]
	waking      combiner[wakeUp]
	asking      combiner[lockName] // who has them
	trying      combiner[*ticket]  // that have, in vain

	tickets map[*ticket]struct{}
	woken   map[lockName]wokenTicket
	client  int64       // what the listener listens as; 0: it does not
	timer   *time.Timer // looks at all tickets
	failing bool        // tickets could not be published when that was last tried
	closed  bool
}

// A ticket is one line's.
type ticket struct {
	queue  *queue
	line   *line
	number int64 // 0: not published yet
	queued bool  // to be published, or refreshed
	sent   int   // how often it was
	flying bool  // it is just now
	over   bool  // its line has gone, or has the lock
	spent  bool  // its line has the lock
	unsent bool  // the last try to publish it failed; the next look at all tickets is another
	first  bool  // nobody stood before it when that was last heard of
	vain   int   // how often in a row its line was refused a lock that nobody seemed to have
	woken  bool  // it may have a stamp in the table that says so
}

func newQueue(l *Locker, place *installation, owner string, run func(exchange) error, reached func() bool, d dialer) *queue {
	q := &queue{
		lines: &l.lines, owner: owner, place: place, log: l.log, stepDown: l.leading.look, run: run, reached: reached,
		tickets: make(map[*ticket]struct{}),
	}
	q.listener = newListener(d, q)
	q.publishing = combiner[*ticket]{limit: maxTickets, run: q.publish, fail: q.unsent}
	q.withdrawing = combiner[*ticket]{limit: maxTickets, run: q.withdraw, fail: func(batch []*ticket, _ error) { q.withdrawLater(batch) }}
	q.waking = combiner[wakeUp]{limit: maxTickets, run: q.wake, fail: func([]wakeUp, error) {}}
	q.asking = combiner[lockName]{limit: maxTickets, run: q.tellHolders, fail: func([]lockName, error) {}}
	q.trying = combiner[*ticket]{limit: maxTickets, run: q.tried, fail: q.untold}
	return q
}

// kind and text are how the table knows the name.
func (n lockName) kind() int {
	if n.key != "" {
		return 0
	}
	return n.id.space()
}

func (n lockName) text() string {
	if n.key != "" {
		return n.key
	}
	return strconv.FormatInt(n.id.number, 10)
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
	if !q.place.hasQueue() {
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

// add publishes a ticket, or refreshes it; lines.mu is held.
func (q *queue) add(t *ticket) {
	if !t.queued {
		t.queued = true
		q.publishing.add(t)
	}
}

// refreshSoon arranges the next look at all tickets; lines.mu is held.
func (q *queue) refreshSoon() {
	if q.timer == nil {
		q.timer = time.AfterFunc(withJitter(lookEvery), q.refresh)
	} else {
		q.timer.Reset(withJitter(lookEvery))
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
	if t.number != 0 {
		t.queue.withdrawing.add(t)
	}
}

// spend ends a ticket whose line got the lock, for which it asked with that number. If
// it is the ticket's, the grant of a lease has removed it; unless it was sent since it
// had been sent so often, which may have come later. lines.mu is held.
func (t *ticket) spend(number int64, sent int) {
	t.spent = true
	if number != 0 && number == t.number && sent == t.sent && t.line.name.kind() == 0 {
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

func (q *queue) publication(batch []*ticket) publication {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	p := publication{life: ticketLifeUnheard}
	if client := q.client; client != 0 {
		p.client, p.life = &client, ticketLife
	}
	for _, t := range batch {
		t.queued, t.flying = false, true // one that is changed from now on is sent again
		t.sent++
		p.kinds = append(p.kinds, int32(t.line.name.kind()))
		p.names = append(p.names, t.line.name.text())
		var number *int64
		if n := t.number; n != 0 {
			number = &n
		}
		p.numbers = append(p.numbers, number)
		p.waiters = append(p.waiters, int32(t.line.places.Len()))
		p.holds = append(p.holds, t.line.holds())
	}
	return p
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

// publish sends a batch of tickets, new and old.
func (q *queue) publish(batch []*ticket) error {
	type row struct {
		Ticket   int64
		Ask      bool
		Deadlock *string
	}
	var rows []row
	p := q.publication(batch)
	err := q.run(func(ctx context.Context, c querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.query(ctx, q.place.statement("queue_publish"),
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
	for i, t := range batch {
		isNew := t.number == 0
		t.number, t.first, t.flying, t.unsent = rows[i].Ticket, rows[i].Ask, false, false
		switch {
		case t.over:
			q.withdrawing.add(t)
		case rows[i].Deadlock != nil:
			t.line.fail(*rows[i].Deadlock)
		case isNew && !t.line.owned && t.line.name.kind() == 0, rows[i].Ask:
			t.line.wake() // a new one asks for a lease after the commit, whatever it saw before
		}
	}
	return nil
}

// unsent is told of tickets that were not sent, because the server is away.
func (q *queue) unsent(batch []*ticket, err error) {
	q.lines.mu.Lock()
	for _, t := range batch {
		t.queued = false
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
	for _, t := range batch {
		t.flying = false
		switch {
		case t.over && t.number != 0: // the outcome may be unknown
			q.withdrawing.add(t)
		case !t.over:
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
				p.fate = fmt.Errorf("%w: who has the lock waits, in the end, for %s, which is held meanwhile", ErrDeadlock, shownKey(held.key))
				p.signal()
				return
			}
		}
	}
}

// ticketsOf is how the table knows tickets; lines.mu is held.
func ticketsOf(batch []*ticket) (kinds []int32, names []string, numbers []int64) {
	for _, t := range batch {
		kinds, names, numbers = append(kinds, int32(t.line.name.kind())), append(names, t.line.name.text()), append(numbers, t.number)
	}
	return kinds, names, numbers
}

// withdraw removes tickets, and wakes whoever was behind them.
func (q *queue) withdraw(batch []*ticket) error {
	var wakeUps []wakeUp
	q.lines.mu.Lock()
	kinds, names, numbers := ticketsOf(batch)
	for _, t := range batch {
		if !t.spent || t.line.name.kind() != 0 {
			wakeUps = append(wakeUps, wakeUp{name: t.line.name})
		}
	}
	q.lines.mu.Unlock()
	err := q.send("queue_withdraw", kinds, names, numbers)
	if err == nil {
		q.waking.add(wakeUps...)
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
	time.AfterFunc(withJitter(lookEvery), func() {
		q.lines.mu.Lock()
		defer q.lines.mu.Unlock()
		if !q.closed {
			q.withdrawing.add(batch...)
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

// reap removes tickets of processes that died, where nobody looked since.
func (q *queue) reap() error {
	if !q.place.hasQueue() {
		return nil
	}
	return q.send("queue_reap")
}

// send runs a statement that answers nothing.
func (q *queue) send(statement string, args ...any) error {
	return q.run(func(ctx context.Context, c querier, _ bool) error {
		rows := c.query(ctx, q.place.statement(statement), args...)
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
	<-q.publishing.done()
	<-q.withdrawing.done()
	<-q.asking.done()
	<-q.trying.done()
	<-q.waking.done()
	q.listener.stop()
}

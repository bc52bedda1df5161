package pgxlock

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A release wakes the first ticket of the queue, and a notification of another process wakes
// the first caller of a line here.

// turnTime is how long who was woken may take before the next one is; what
// pgxlock_wake_batch() keeps to.
const turnTime = 250 * time.Millisecond

// askAgain is how soon to ask again for an advisory lock that nobody seemed to have.
const askAgain = 5 * time.Millisecond

// handOverTime is for how long callers of one Locker hand an advisory lock over among
// themselves before the Locker asks the server whether other processes wait. Usually their
// notification comes within milliseconds; it may be lost, or not get through a pooler. One
// statement in that time is too little to slow down a Locker whose lock nobody else wants.
const handOverTime = 100 * time.Millisecond

// A wokenTicket is looked at again when it is due.
type wokenTicket struct {
	number int64
	due    time.Time
}

// A wakeUp is for the first who waits for a lock; or, where number is not 0, for the
// one behind that ticket, if it slept through its turn.
type wakeUp struct {
	name   lockkey.Name
	number int64
	check  bool // the lock is held here; only whether others wait for it is asked
}

// handedOver counts a hand-over of an advisory lock from one caller here to the next;
// lines.mu is held.
func (q *queue) handedOver(name lockkey.Name) {
	if q.closed || !q.place.Installed() {
		return
	}
	q.handed[name] = struct{}{}
	if time.Since(q.checked) < handOverTime {
		return
	}
	q.checked = time.Now()
	for name := range q.handed {
		q.waking.Add(wakeUp{name: name, check: true})
	}
	clear(q.handed)
}

// freed wakes the first of those who wait for locks that were given back.
func (q *queue) freed(names []lockkey.Name) {
	if q.place.Installed() {
		q.waking.Add(forFirst(names)...)
	}
}

// freedAfter is freed for locks that others are known to wait for: it returns when
// they have been woken, on the connection that gave the locks back.
func (q *queue) freedAfter(run func(dbconn.Exchange) error, names []lockkey.Name) {
	if len(names) > 0 {
		if err := q.wakeOn(run, forFirst(names)); err != nil {
			q.freed(names)
		}
	}
}

func forFirst(names []lockkey.Name) []wakeUp {
	wakeUps := make([]wakeUp, len(names))
	for i, name := range names {
		wakeUps[i] = wakeUp{name: name}
	}
	return wakeUps
}

// wake sends wake-ups. An error means that the server cannot be reached.
func (q *queue) wake(batch []wakeUp) error {
	if err := q.wakeOn(q.run, batch); err != nil && !q.reached() {
		return err
	}
	return nil
}

// wakeOn sends wake-ups, in a transaction of its own: NOTIFY in one that writes what must
// be durable would make the commits of all databases wait for each other.
func (q *queue) wakeOn(run func(dbconn.Exchange) error, batch []wakeUp) error {
	type row struct{ N, Ticket int64 }
	kinds, names, numbers := make([]int32, len(batch)), make([]string, len(batch)), make([]*int64, len(batch))
	for i, w := range batch {
		kinds[i], names[i] = int32(w.name.Kind()), w.name.Text()
		if w.number != 0 {
			numbers[i] = &w.number
		}
	}
	var woken []row
	var wanted []lockkey.Name
	err := run(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		woken, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.QueueWake), kinds, names, numbers), pgx.RowToStructByPos[row])
		return err
	})
	if err != nil {
		return err
	}
	q.lines.mu.Lock()
	defer func() {
		q.lines.mu.Unlock()
		for _, name := range wanted {
			q.wanted(name)
		}
	}()
	for _, w := range woken {
		if w.N < 1 || w.N > int64(len(batch)) {
			continue
		}
		l := q.lines.of[batch[w.N-1].name]
		_, leaving := q.leaving[w.Ticket]
		_, sending := q.sending[batch[w.N-1].name]
		others := !leaving && !sending && (l == nil || l.ticket == nil || l.ticket.number != w.Ticket)
		if others {
			q.see(batch[w.N-1].name)
		}
		if others && batch[w.N-1].check {
			wanted = append(wanted, batch[w.N-1].name)
		}
		if told := batch[w.N-1]; told.number != w.Ticket || !isSemaphore(told.name) { // that one looked free to who looked again, and always does
			q.lookAgain(told.name, w.Ticket)
		}
	}
	return nil
}

// lookAgain arranges a look whether a ticket slept through its turn. A later wake-up for
// the same lock, which was taken and given back meanwhile, has a look of its own.
// lines.mu is held.
func (q *queue) lookAgain(name lockkey.Name, number int64) {
	if q.closed {
		return
	}
	if q.woken == nil {
		q.woken = make(map[lockkey.Name]wokenTicket)
	}
	q.woken[name] = wokenTicket{number, time.Now().Add(turnTime + turnTime/10)}
	if len(q.woken) == 1 {
		q.lookLater(turnTime + turnTime/10)
	}
}

func (q *queue) lookLater(d time.Duration) {
	time.AfterFunc(d, func() {
		q.lines.mu.Lock()
		defer q.lines.mu.Unlock()
		now, next := time.Now(), turnTime
		for name, w := range q.woken {
			if left := w.due.Sub(now); left > 0 {
				next = min(next, left)
				continue
			}
			delete(q.woken, name)
			q.waking.Add(wakeUp{name: name, number: w.number})
		}
		if len(q.woken) > 0 && !q.closed {
			q.lookLater(next)
		}
	})
}

// heard takes a notification: kind and name of a lock whose line should ask; or, sent
// to the holder, that others wait for it.
func (q *queue) heard(payload string, holder bool) {
	kind, text, ok := strings.Cut(payload, ":")
	if !ok {
		return
	}
	name := lockkey.Name{Key: text}
	if kind != "0" {
		number, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return
		}
		name = lockkey.Name{ID: lockkey.ID{Number: number, Pair: kind == "2"}}
	}
	if holder {
		q.enterIfWaiting(name)
		q.wanted(name)
		return
	}
	q.wakeHere(name, true)
}

// wakeHere tells the one in front of a line to ask, and whether it is first of all.
func (q *queue) wakeHere(name lockkey.Name, first bool) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	if l := q.lines.of[name]; l != nil { // else its ticket is being withdrawn, which wakes the next
		if l.ticket != nil && first {
			l.ticket.first, l.ticket.woken = true, true
		}
		l.wake()
	}
}

// enterIfWaiting gives those a place in the queue who wait here for a lock that this
// process has, and others want.
func (q *queue) enterIfWaiting(name lockkey.Name) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.see(name)
	if l := q.lines.of[name]; l != nil {
		q.enter(l)
	}
}

// see takes note that others have a lock, or wait for it; lines.mu is held.
func (q *queue) see(name lockkey.Name) {
	if name.Kind() == 0 {
		return
	}
	if len(q.others) >= q.forget { // there may be thousands at once: to look at all of them each time takes too long
		for name := range q.others {
			if !q.contended(name) {
				delete(q.others, name)
			}
		}
		q.forget = max(2*len(q.others), maxTickets)
	}
	q.others[name] = time.Now()
}

// contendedFor is how long a Locker goes on drawing tickets for an advisory lock after it
// last saw that others have it or wait for it. Each of those who wait asks once a second.
const contendedFor = 3 * lookEvery

// contended reports whether others were seen to have an advisory lock, or to wait for it,
// in that time. A Locker that is alone again needs no tickets. The server itself knows who
// waits for a lease. lines.mu is held.
func (q *queue) contended(name lockkey.Name) bool {
	return name.Kind() == 0 || time.Since(q.others[name]) < contendedFor
}

// othersWait is contended for who does not hold lines.mu.
func (q *queue) othersWait(name lockkey.Name) bool {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	return q.contended(name)
}

// refused is told that the one in front has asked in vain. It reports whether that had
// better ask again, now and then: not every holder of an advisory lock tells that it
// has given it back.
func (q *queue) refused(l *line) bool {
	if l.name.Kind() == 0 {
		return false
	}
	q.asking.Add(l.name)
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	q.see(l.name)
	return l.ticket != nil && l.ticket.first
}

// asked is told that the one in front has asked in vain. A grant of leases looks at the
// ticket itself; the session of advisory locks knows of none. Who was woken, and is not
// known to have tried, loses its precedence.
func (q *queue) asked(l *line) {
	if l.name.Kind() == 0 {
		return
	}
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	if t := l.ticket; t != nil && t.number != 0 && (t.woken || q.client == 0) { // who does not listen does not know
		t.woken = false
		q.trying.Add(t)
	}
}

// tried says of tickets that they have asked in vain.
func (q *queue) tried(batch []*ticket) error {
	q.lines.mu.Lock()
	kinds, names, numbers := ticketsOf(batch)
	q.lines.mu.Unlock()
	err := q.send(statements.QueueRefused, kinds, names, numbers)
	if err == nil {
		return nil
	}
	q.untold(batch, err)
	if q.reached() {
		return nil
	}
	return err
}

// untold is told of tickets whose tries are not known. The next one is, instead.
func (q *queue) untold(batch []*ticket, _ error) {
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	for _, t := range batch {
		t.woken = true
	}
}

// tellHolders tells those who have advisory locks that they are wanted. Where nobody
// has one any more it was given back just now, and nobody may have been told.
func (q *queue) tellHolders(names []lockkey.Name) error {
	kinds, ids := make([]int32, len(names)), make([]int64, len(names))
	for i, name := range names {
		kinds[i], ids[i] = int32(name.Kind()), name.ID.Number
	}
	var told []int32
	err := q.run(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		told, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.QueueNotifyHolders), kinds, ids), pgx.RowTo[int32])
		return err
	})
	if err != nil && !q.reached() {
		return err
	}
	q.lines.mu.Lock()
	defer q.lines.mu.Unlock()
	for i, n := range told {
		l := q.lines.of[names[i]]
		if l == nil || l.ticket == nil {
			continue
		}
		if n > 0 {
			l.ticket.vain = 0
			continue
		}
		// One that is kept from others for long, by a fenced transaction of who has
		// ended, is not asked for all the time.
		time.AfterFunc(askAgain<<min(l.ticket.vain, 6), func() { q.wakeHere(names[i], false) })
		l.ticket.vain++
	}
	return nil
}

package waitqueue

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A release wakes the first ticket of the queue, and a notification from another process wakes
// the first waiter of a local queue in this process.

// askAgain is how soon to try again for an advisory lock that no session seemed to hold.
const askAgain = 5 * time.Millisecond

// A wokenTicket is a ticket that was woken; when it is due, a second wake-up checks whether it
// let clock.WakeTimeout pass, which pgxlock_wake_batch() uses as well.
type wokenTicket struct {
	number int64
	due    time.Time
}

// A wakeUp is for the first waiter of a lock. If number is not 0, it is for the waiter behind
// that ticket, if the ticket let its wake timeout pass.
type wakeUp struct {
	name   lockkey.Name
	number int64
	check  bool // the lock is held here: the answer only shows whether other processes wait for it
	looks  int  // how often it found nobody before
}

// Wake wakes, in the background, the first waiter of each of the locks, which were released. Where
// a ticket of this process is just being removed, the wake-up that follows the removal does it: an
// earlier one would be for that ticket.
func (q *Queue) Wake(names []lockkey.Name) {
	if !q.installed() {
		return
	}
	q.mu.Lock()
	left := slices.DeleteFunc(slices.Clone(names), func(name lockkey.Name) bool { return q.removing[name] > 0 })
	q.mu.Unlock()
	q.waking.Add(forFirst(left)...)
}

// WakeOn is Wake for locks that other processes are known to wait for: it wakes them on the
// connection that released the locks, before it returns.
func (q *Queue) WakeOn(run func(dbconn.Exchange) error, names []lockkey.Name) {
	if len(names) > 0 {
		if err := q.wakeOn(run, forFirst(names)); err != nil {
			q.Wake(names)
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
func (q *Queue) wake(batch []wakeUp) error {
	if err := q.wakeOn(q.server.Runner.Do, batch); err != nil && !q.server.Runner.Reached() {
		return err
	}
	return nil
}

// wakeOn sends wake-ups in a transaction of their own. If a transaction with durable writes
// sent a NOTIFY, the commits of all databases would wait for each other.
func (q *Queue) wakeOn(run func(dbconn.Exchange) error, batch []wakeUp) error {
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
		woken, err = pgx.CollectRows(c.Query(ctx, q.server.Place.Statement(statements.QueueWake), kinds, names, numbers), pgx.RowToStructByPos[row])
		return err
	})
	if err != nil {
		return err
	}
	found := make(map[lockkey.Name]bool, len(woken))
	q.mu.Lock()
	defer func() {
		q.mu.Unlock()
		for _, name := range wanted {
			q.notifyHolder(name)
		}
	}()
	for _, w := range woken {
		if w.N < 1 || w.N > int64(len(batch)) {
			continue
		}
		found[batch[w.N-1].name] = true
		l := q.locals[batch[w.N-1].name]
		_, leaving := q.leaving[w.Ticket]
		_, sending := q.sending[batch[w.N-1].name]
		others := !leaving && !sending && (l == nil || l.ticket == nil || l.ticket.number != w.Ticket)
		if others {
			q.seeLocked(batch[w.N-1].name)
		}
		if others && batch[w.N-1].check {
			wanted = append(wanted, batch[w.N-1].name)
		}
		if sent := batch[w.N-1]; sent.number != w.Ticket || !sent.name.IsSemaphore() { // a semaphore looks free to every later check: one check is enough
			q.lookAgainLocked(sent.name, w.Ticket)
		}
	}
	for _, w := range batch {
		if w.number == 0 && !w.check && !found[w.name] {
			q.foundNobodyLocked(w)
		}
	}
	return nil
}

// looks are the pauses after which a wake-up that found nobody looks again.
var looks = [...]time.Duration{2 * time.Millisecond, 16 * time.Millisecond, 128 * time.Millisecond}

// foundNobodyLocked has a wake-up look again soon, for an advisory lock that other processes were
// seen to want. One of them may be publishing its ticket: it looked for tickets ahead of it before
// ours was removed, and commits after the wake-up has looked. Then nobody would wake it until its
// next refresh. Leases need none of this: a new ticket for a lease tries after its commit.
func (q *Queue) foundNobodyLocked(w wakeUp) {
	name := w.name
	if name.Kind() == 0 || w.looks == len(looks) || q.closed || !q.contendedLocked(name) {
		return
	}
	if due := q.looking[name]; due != nil { // a later release has all looks of its own
		if due.looks <= w.looks {
			return
		}
		due.timer.Stop()
	}
	due := &dueLook{looks: w.looks}
	q.looking[name] = due
	due.timer = time.AfterFunc(looks[w.looks], func() {
		wakes := q.server.Session != nil && q.server.Session.WakesOnRelease(name.ID)
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.looking[name] != due {
			return
		}
		delete(q.looking, name)
		if !wakes && !q.closed {
			q.waking.Add(wakeUp{name: name, looks: due.looks + 1})
		}
	})
}

// A dueLook is the next look of a wake-up that found nobody.
type dueLook struct {
	looks int // how often it has looked again already
	timer *time.Timer
}

// lookAgainLocked arranges a check whether a ticket let its wake timeout pass. If the lock is
// acquired and released meanwhile, the wake-up of that release replaces the check by its own.
func (q *Queue) lookAgainLocked(name lockkey.Name, number int64) {
	if q.closed {
		return
	}
	q.woken[name] = wokenTicket{number, time.Now().Add(clock.WakeTimeout + clock.WakeTimeout/10)}
	if len(q.woken) == 1 {
		q.lookLater(clock.WakeTimeout + clock.WakeTimeout/10)
	}
}

// lookLater sends, after d, the wake-ups that check woken tickets.
func (q *Queue) lookLater(d time.Duration) {
	time.AfterFunc(d, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.closed {
			return
		}
		now, next := time.Now(), clock.WakeTimeout
		for name, w := range q.woken {
			if left := w.due.Sub(now); left > 0 {
				next = min(next, left)
				continue
			}
			delete(q.woken, name)
			q.waking.Add(wakeUp{name: name, number: w.number})
		}
		if len(q.woken) > 0 {
			q.lookLater(next)
		}
	})
}

// heard handles the text of a notification, the kind and name of a lock. The local queue of the
// lock should try, or, if the notification is for the holder, other processes wait for the
// lock. Any role may send one: whether it is about a lock of this process is found out without
// a mutex.
func (q *Queue) heard(text string, holder bool) {
	name, ok := lockkey.ParseName(text)
	switch {
	case !ok:
	case !holder:
		if q.waiting.Has(name) { // else its ticket is being withdrawn, which wakes the next
			q.wakeHere(name, true)
		}
	case name.Kind() != 0 && q.server.Session != nil && q.server.Session.Had(name.ID):
		q.enterIfWaiting(name)
		q.notifyHolder(name)
	}
}

// notifyHolder notifies the lock session of this process that other processes wait for one of
// its locks.
func (q *Queue) notifyHolder(name lockkey.Name) {
	if q.server.Session != nil {
		q.server.Session.Wanted(name)
	}
}

// wakeHere wakes the first waiter of a local queue. first: its ticket is the first of all
// processes.
func (q *Queue) wakeHere(name lockkey.Name, first bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.locals[name]; l != nil {
		if l.ticket != nil && first {
			l.ticket.first, l.ticket.woken = true, true
		}
		l.wakeLocked()
	}
}

// enterIfWaiting publishes a ticket for callers that wait here for a lock which this process
// has and other processes want.
func (q *Queue) enterIfWaiting(name lockkey.Name) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.seeLocked(name)
	if l := q.locals[name]; l != nil {
		q.enterLocked(l)
	}
}

// refused records that a try of the first waiter was refused. It notifies the holder of an
// advisory lock. It reports whether the waiter must poll: not every holder of an advisory lock
// announces its release. Until the ticket is published, callers here would leave a free lock to
// others, and wait for a queue that is not reached yet.
func (q *Queue) refused(l *localQueue) bool {
	if l.name.Kind() == 0 {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if l.ticket == nil || !l.ticket.publishedLocked() {
		return false
	}
	q.asking.Add(l.name)
	q.seeLocked(l.name)
	return l.ticket.first
}

// asked records with the ticket that a try of the first waiter was refused, because a woken
// ticket that is not known to have tried loses its precedence. The statement that grants
// leases checks the ticket itself; the lock session knows no tickets.
func (q *Queue) asked(l *localQueue) {
	if l.name.Kind() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if t := l.ticket; t != nil && t.number != 0 && (t.woken || !q.Listening()) { // without a listener we cannot know whether it was woken
		t.woken = false
		q.trying.Add(t)
	}
}

// tried records in the table that the tries of tickets were refused.
func (q *Queue) tried(batch []*ticket) error {
	q.mu.Lock()
	kinds, names, numbers := ticketsOfLocked(batch)
	q.mu.Unlock()
	err := q.send(statements.QueueRefused, kinds, names, numbers)
	if err == nil {
		return nil
	}
	q.unrecorded(batch, err)
	if q.server.Runner.Reached() {
		return nil
	}
	return err
}

// unrecorded handles tickets whose tries could not be recorded: their next try is recorded
// instead.
func (q *Queue) unrecorded(batch []*ticket, _ error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, t := range batch {
		t.woken = true
	}
}

// notifyHolders notifies the holders of advisory locks that other processes wait. A lock without
// a holder was released just now, perhaps without waking a waiter: then the waiter tries again
// soon.
func (q *Queue) notifyHolders(names []lockkey.Name) error {
	kinds, ids := make([]int32, len(names)), make([]int64, len(names))
	for i, name := range names {
		kinds[i], ids[i] = int32(name.Kind()), name.ID.Number
	}
	var notified []int32
	err := q.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		notified, err = pgx.CollectRows(c.Query(ctx, q.server.Place.Statement(statements.QueueNotifyHolders), kinds, ids), pgx.RowTo[int32])
		return err
	})
	if err != nil && !q.server.Runner.Reached() {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, n := range notified {
		l := q.locals[names[i]]
		if l == nil || l.ticket == nil {
			continue
		}
		if n > 0 {
			l.ticket.unheld = 0
			continue
		}
		// A fenced transaction of a former holder may keep the lock from others for long: then
		// the pause doubles up to 64 times askAgain.
		time.AfterFunc(askAgain<<min(l.ticket.unheld, 6), func() { q.wakeHere(names[i], false) })
		l.ticket.unheld++
	}
	return nil
}

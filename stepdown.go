package pgxlock

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// A request to step down is a row of the table pgxlock_step_down. A notification makes leaders
// look there, and they look now and then as well.

// stepDownEvery is about how often a leader looks that listens, and lookEvery how often
// one does that cannot.
const stepDownEvery = 10 * time.Second

// leading is the terms under way of one Locker.
type leading struct {
	locker *Locker

	mu      sync.Mutex
	terms   map[*Lock]term
	timer   *time.Timer // looks at all of them; nil before the first
	looking bool        // a look is under way
	again   bool        // another one shall follow it
	looks   batcher.Background
	stopped bool
}

// A term ends when somebody asks for that.
type term struct {
	stepDown func(why error)
	began    time.Duration // on the Locker's clock
}

// begin adds a term, which stepDown ends when somebody asks for that.
func (l *leading) begin(lock *Lock, stepDown func(why error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.terms == nil {
		l.terms = make(map[*Lock]term)
	}
	l.terms[lock] = term{stepDown, l.locker.now()}
	if q := l.locker.queue; q != nil && q.place.Installed() {
		q.listener.start()
		l.lookSoon()
	}
}

// any reports whether a term is under way.
func (l *leading) any() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.terms) > 0
}

func (l *leading) end(lock *Lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.terms, lock)
}

// lookSoon arranges the next look; l.mu is held.
func (l *leading) lookSoon() {
	every := lookEvery
	if l.locker.queue.listening() {
		every = stepDownEvery
	}
	switch {
	case l.stopped:
	case l.timer == nil:
		l.timer = time.AfterFunc(clock.Jitter(every), l.look)
	default:
		l.timer.Reset(clock.Jitter(every))
	}
}

// look looks whether any of the leaders was asked to step down.
func (l *leading) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopped || len(l.terms) == 0:
	case l.looking:
		l.again = true
	default:
		l.looking = true
		l.looks.Run(l.lookAtAll)
	}
}

func (l *leading) lookAtAll() {
	for {
		asked, err := l.asked(l.all())
		l.mu.Lock()
		for lock, t := range l.terms { // maybe a later one of the session that was asked for
			if why, ok := asked[l.locker.backend.holdID(lock)]; ok && !t.beganAfter(why.age, l.locker.now(), lock) {
				t.stepDown(why.error)
			}
		}
		if again := l.again && err == nil; again && !l.stopped {
			l.again = false
			l.mu.Unlock()
			continue
		}
		l.looking, l.again = false, false
		if len(l.terms) > 0 {
			l.lookSoon()
		}
		l.mu.Unlock()
		return
	}
}

// earlierRequest is by how much a request is older than a term that was made of an
// earlier holder: longer than the answer to a grant takes.
const earlierRequest = 2 * dbconn.Timeout

// beganAfter reports whether a request of that age was made before the term. The holder of
// a lease has an id of its own, so that none is; that of an advisory lock is known by its
// session, which may have had the lock before.
func (t term) beganAfter(age, now time.Duration, lock *Lock) bool {
	return lock.hold != nil && age > now-t.began+earlierRequest
}

func (l *leading) all() []*Lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	locks := make([]*Lock, 0, len(l.terms))
	for lock := range l.terms {
		locks = append(locks, lock)
	}
	return locks
}

// A stepDownRequest is what one holder was asked, and how long ago.
type stepDownRequest struct {
	error
	age time.Duration
}

// asked returns what was asked of the holders of the locks, by their ids.
func (l *leading) asked(locks []*Lock) (map[string]stepDownRequest, error) {
	type row struct {
		N       int64
		By, Why string
		MS      int64
	}
	kinds, names, holders := make([]int32, len(locks)), make([]string, len(locks)), make([]string, len(locks))
	for i, lock := range locks {
		name := l.locker.backend.name(lock.key)
		kinds[i], names[i], holders[i] = int32(name.Kind()), name.Text(), l.locker.backend.holdID(lock)
	}
	var rows []row
	q := l.locker.queue
	err := q.run(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.Query(ctx, q.place.Statement(statements.LeaderStepDowns), kinds, names, holders), pgx.RowToStructByPos[row])
		return err
	})
	asked := make(map[string]stepDownRequest)
	for _, r := range rows {
		if r.N < 1 || r.N > int64(len(locks)) {
			continue
		}
		why := fmt.Errorf("%w by %s", ErrStepDown, r.By)
		if r.Why != "" {
			why = fmt.Errorf("%w: %s", why, r.Why)
		}
		asked[holders[r.N-1]] = stepDownRequest{why, time.Duration(r.MS) * time.Millisecond}
	}
	return asked, err
}

// ask asks whoever leads by that name to step down.
func (l *leading) ask(ctx context.Context, name lockkey.Name) error {
	q := l.locker.queue
	if q == nil {
		l.askHere(name)
		return nil
	}
	asked := make(chan error, 1)
	l.looks.Run(func() { // no context of a caller's reaches our connections
		asked <- q.run(func(ctx context.Context, c dbconn.Querier, _ bool) error {
			rows := c.Query(ctx, q.place.Statement(statements.LeaderAskToStepDown), name.Kind(), name.Text(), q.owner)
			rows.Close()
			return rows.Err()
		})
	})
	select {
	case err := <-asked:
		return err
	case <-ctx.Done():
		return lockerr.ContextError(ctx)
	}
}

// askHere is ask for locks that are in this process alone.
func (l *leading) askHere(name lockkey.Name) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for lock, t := range l.terms {
		if l.locker.backend.name(lock.key) == name {
			t.stepDown(ErrStepDown)
		}
	}
}

// stop ends the looks.
func (l *leading) stop() {
	l.mu.Lock()
	l.stopped = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.mu.Unlock()
	l.looks.Wait()
}

package pgxlock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
	"github.com/pgxlock/pgxlock/sql"
)

// A request to step down is a row of the table pgxlock_step_down. Leaders check the table
// after a notification, and also from time to time.

// stepDownEvery is about how often a leader checks for requests if it listens; if it cannot,
// it checks every clock.CheckInterval.
const stepDownEvery = 10 * time.Second

// leading is the current terms of leaders of one Locker.
type leading struct {
	locker *Locker

	// Where the requests are, and what hears of them; zero: there is no server.
	server   waitqueue.Server
	listener listener

	mu       sync.Mutex
	terms    map[*Lock]term
	followed map[string]int64 // by holder id: when the request was made that ended its term last
	timer    *time.Timer      // checks all of them; nil before the first
	looking  bool             // a check is running
	again    bool             // another check must follow it
	looks    batcher.Background
	stopped  bool
}

// A listener receives the notifications of requests.
type listener interface {
	StartListener()
	Listening() bool
}

// A term is the time for which one lock makes its holder the leader.
type term struct {
	work     context.Context // of the leader's function
	stepDown func(why error) // ends the term
	began    time.Duration   // on the Locker's clock
}

// begin adds a term. A request to step down calls stepDown.
func (l *leading) begin(work context.Context, lock *Lock, stepDown func(why error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.terms == nil {
		l.terms, l.followed = make(map[*Lock]term), make(map[string]int64)
	}
	l.terms[lock] = term{work, stepDown, l.locker.now()}
	if l.installed() {
		l.listener.StartListener()
		l.checkSoonLocked()
	}
}

// installed reports whether there is a table for requests, as far as is known.
func (l *leading) installed() bool { return l.server.Place != nil && l.server.Place.Installed() }

// Any implements [waitqueue.Leaders].
func (l *leading) Any() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.terms) > 0
}

func (l *leading) end(lock *Lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.terms, lock)
	if l.locker.kind != KindAdvisory { // no other term has its holder id
		delete(l.followed, lock.hold.ID())
	}
}

// leads reports whether the work of a current term for the name goes on.
func (l *leading) leads(name lockkey.Name) bool {
	var all []context.Context
	l.mu.Lock()
	for lock, t := range l.terms {
		if l.locker.name(lock.hold.Key) == name {
			all = append(all, t.work)
		}
	}
	l.mu.Unlock()
	return slices.ContainsFunc(all, func(work context.Context) bool { return work.Err() == nil }) // which may find the loss, and tell Observe
}

// checkSoonLocked arranges the next check.
func (l *leading) checkSoonLocked() {
	every := clock.CheckInterval
	if l.listener.Listening() {
		every = stepDownEvery
	}
	switch {
	case l.stopped:
	case l.timer == nil:
		l.timer = time.AfterFunc(clock.Jitter(every), l.Look)
	default:
		l.timer.Reset(clock.Jitter(every))
	}
}

// Look checks, in the background, whether any of the leaders was asked to step down.
func (l *leading) Look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.stopped || len(l.terms) == 0:
	case l.looking:
		l.again = true
	default:
		l.looking = true
		l.looks.Run(l.checkAll)
	}
}

func (l *leading) checkAll() {
	for {
		asked, err := l.asked(l.all())
		l.mu.Lock()
		for lock, t := range l.terms { // for an advisory lock, maybe a later term of the same session than the request meant
			id := lock.hold.ID()
			if why, ok := asked[id]; ok && why.made != l.followed[id] && !t.beganAfter(why.age, l.locker.now(), lock) {
				l.followed[id] = why.made
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
			l.checkSoonLocked()
		}
		l.mu.Unlock()
		return
	}
}

// earlierRequest is how much older than a term a request must be to count as one to an earlier
// leader: more than the answer to a grant takes.
const earlierRequest = 2 * dbconn.Timeout

// beganAfter reports whether a request of that age was made before the term. For a lease it is
// always false, because each acquisition has its own holder id. The holder of an advisory lock
// is known by its session, which may have had the lock before.
func (t term) beganAfter(age, now time.Duration, lock *Lock) bool {
	return lock.locker.kind == KindAdvisory && age > now-t.began+earlierRequest
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

// A stepDownRequest is a request to one holder: the error that its term ends with, how long ago
// the request was made, and when, by the server's clock: the server returns it again.
type stepDownRequest struct {
	error
	age  time.Duration
	made int64
}

// asked returns the requests to the holders of the locks, by the ids of the holders.
func (l *leading) asked(locks []*Lock) (map[string]stepDownRequest, error) {
	type row struct {
		N       int64
		By, Why string
		MS      int64
		Made    int64
	}
	kinds, names, holders := make([]int32, len(locks)), make([]string, len(locks)), make([]string, len(locks))
	for i, lock := range locks {
		name := l.locker.name(lock.hold.Key)
		kinds[i], names[i], holders[i] = int32(name.Kind()), name.Text(), lock.hold.ID()
	}
	var rows []row
	err := l.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) (err error) {
		rows, err = pgx.CollectRows(c.Query(ctx, l.server.Place.Statement(statements.LeaderStepDowns), kinds, names, holders), pgx.RowToStructByPos[row])
		return err
	})
	asked := make(map[string]stepDownRequest)
	for _, r := range rows {
		if r.N < 1 || r.N > int64(len(locks)) {
			continue
		}
		why := fmt.Errorf("%w by %s", ErrStepDown, oneline.Text(r.By))
		if r.Why != "" {
			why = fmt.Errorf("%w: %s", why, oneline.Text(r.Why))
		}
		asked[holders[r.N-1]] = stepDownRequest{why, time.Duration(r.MS) * time.Millisecond, r.Made}
	}
	return asked, err
}

// ask asks the leader by that name to step down.
func (l *leading) ask(ctx context.Context, name lockkey.Name) error {
	if l.server.Runner == nil {
		l.askHere(name)
		return nil
	}
	asked := make(chan error, 1)
	l.looks.Run(func() { // a caller's context must not reach the Locker's connections
		asked <- l.server.Runner.Do(func(ctx context.Context, c dbconn.Querier, _ bool) error {
			rows := c.Query(ctx, l.server.Place.Statement(statements.LeaderAskToStepDown), name.Kind(), name.Text(), l.server.Owner, "")
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

// askHere is ask for a Locker without a server.
func (l *leading) askHere(name lockkey.Name) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for lock, t := range l.terms {
		if l.locker.name(lock.hold.Key) == name {
			t.stepDown(ErrStepDown)
		}
	}
}

// stop ends the checks.
func (l *leading) stop() {
	l.mu.Lock()
	l.stopped = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.mu.Unlock()
	l.looks.Wait()
}
